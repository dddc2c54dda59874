// The live view in the browser. The kernel draws it; here it is put into the page.

const STYLE = `
.distnb-live{font:13px/1.5 var(--jp-ui-font-family,system-ui,sans-serif);color:var(--jp-ui-font-color1,inherit);padding:4px 0}
.distnb-live .status{display:flex;gap:8px;align-items:center}
.distnb-live .dot{width:9px;height:9px;border-radius:50%;background:#10b981;flex:none}
.distnb-live .dot.starting,.distnb-live .dot.interrupted{background:#eab308}
.distnb-live .dot.ended{background:#808080}
.distnb-live .dot.failed,.distnb-live .dot.died{background:#ef4444}
.distnb-live .dot.running{animation:distnb-pulse 1.4s ease-in-out infinite}
@keyframes distnb-pulse{50%{opacity:.35}}
.distnb-live .charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(240px,1fr));gap:4px 8px}
.distnb-live svg{width:100%;height:auto;max-width:340px}
.distnb-live svg.queue{display:block;max-width:640px;margin:2px 0}
.distnb-live svg text{fill:var(--jp-ui-font-color2,#808080)}
.distnb-live svg .name{fill:var(--jp-ui-font-color1,#808080)}
.distnb-live td,.distnb-live th{color:inherit;font-variant-numeric:tabular-nums}
`;

export default () => {
  // A new widget has drawn nothing yet; one that has was drawn in a page that is gone.
  let restored = false;
  return {
    initialize({ model }) {
      restored = model.get("html") !== "";
      if (restored) model.send({ restored: true });
    },
    render({ model, el }) {
      el.innerHTML = `<div class="distnb-live"><style>${STYLE}</style><div class="drawn"></div>
        <details hidden><summary>The page was reloaded while the cell ran; the end of what it wrote</summary><pre></pre></details></div>`;
      const [drawn, written] = [el.querySelector(".drawn"), el.querySelector("details")];
      let [pending, left] = [false, false];
      const draw = () => {
        pending = false;
        drawn.innerHTML = model.get("html");
        if (left) mark();
        written.hidden = !(restored && model.get("written"));
        written.querySelector("pre").textContent = model.get("written");
      };
      const schedule = () => {
        if (!pending) requestAnimationFrame(draw); // a hidden tab draws no frames; it draws once when it is looked at
        pending = true;
      };
      const changed = () => {
        left = false;
        schedule();
      };
      // The kernel ended, or was restarted: nothing will come any more. What came before may still have to be drawn.
      const orphaned = () => {
        left = true;
        mark();
      };
      const mark = () => {
        const [dot, head] = [drawn.querySelector(".dot"), drawn.querySelector(".head")];
        if (!dot?.matches(".starting,.running")) return;
        head.textContent = head.textContent.replace(/· (starting|running) ·/, "· the kernel ended ·");
        dot.className = "dot died";
      };
      model.on("change:html", changed);
      model.on("comm_live_update", orphaned);
      schedule();
      return () => {
        model.off("change:html", changed);
        model.off("comm_live_update", orphaned);
      };
    },
  };
};
