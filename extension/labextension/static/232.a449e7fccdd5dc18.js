"use strict";(self.rspackChunkdistnb=self.rspackChunkdistnb||[]).push([[232],{475(t,e,r){var n=r(601),o=r.n(n),i=r(314),a=(r.n(i))()(o());a.push([t.id,`.distnb-panel [hidden] {
  display: none;
}

.distnb-section h3 {
  margin: 0;
  font-size: var(--jp-ui-font-size0);
  font-weight: 600;
  letter-spacing: 1px;
  text-transform: uppercase;
}

.distnb-panel .jp-SidePanel-toolbar {
  padding: 0 8px;
}

.distnb-panel .jp-SidePanel-content {
  overflow: auto;
}

.distnb-content {
  padding: 8px 12px;
  line-height: var(--jp-content-line-height);
}

.distnb-content :is(p, pre):empty,
.distnb-content > jp-button:empty {
  display: none;
}

.distnb-content > jp-button::part(control) {
  padding: 0 8px;
}

.distnb-content p {
  margin: 4px 0 8px;
}

.distnb-notebook {
  overflow: hidden;
  text-overflow: ellipsis;
  white-space: nowrap;
}

.distnb-notebook,
.distnb-facts,
.distnb-at,
.distnb-memory,
.distnb-line {
  color: var(--jp-ui-font-color2);
}

.distnb-count {
  display: flex;
  align-items: center;
}

.distnb-panel input.jp-mod-styled {
  box-sizing: border-box;
  width: 56px;
  height: 22px;
  margin: 0 8px 0 2px;
  padding: 0 4px;
  font-size: var(--jp-ui-font-size1);
  color: var(--jp-ui-font-color1);
  background: var(--jp-input-background, var(--jp-layout-color1));
  border: var(--jp-border-width) solid var(--jp-border-color1);
  border-radius: var(--jp-border-radius);
}

.distnb-panel input.jp-mod-styled:disabled {
  opacity: 0.4;
}

.distnb-panel :is(pre, input):focus-visible,
.distnb-status:focus-visible {
  outline: var(--jp-focus-outline-width, 2px) solid var(--jp-focus-outline-color, var(--jp-brand-color1));
  outline-offset: 1px;
}

.distnb-error {
  color: var(--jp-error-color0, var(--jp-error-color1));
  white-space: pre-wrap;
}

.distnb-head {
  margin: 8px 0;
}

.distnb-title {
  display: flex;
  justify-content: space-between;
  gap: 8px;
}

.distnb-facts {
  display: flex;
  flex-wrap: wrap;
  gap: 0 12px;
  font-size: var(--jp-ui-font-size0);
  font-variant-numeric: tabular-nums;
}

.distnb-facts > span,
.distnb-state {
  white-space: nowrap;
}

.distnb-engines {
  list-style: none;
  margin: 0 0 8px;
  padding: 0;
}

.distnb-engine {
  display: grid;
  grid-template-columns: auto 1fr auto;
  gap: 2px 8px;
  padding: 6px 0;
  border-top: var(--jp-border-width) solid var(--jp-border-color2);
}

.distnb-name {
  font-weight: 600;
}

.distnb-at,
.distnb-memory {
  grid-column: 1 / -1;
  font-size: var(--jp-ui-font-size0);
}

.distnb-mod-running {
  color: var(--jp-brand-color1);
}

.distnb-mod-busy {
  color: var(--jp-warn-color0, var(--jp-warn-color1));
}

.distnb-mod-error {
  color: var(--jp-error-color1);
  font-weight: 600;
}

.distnb-memory {
  display: flex;
  align-items: center;
  gap: 8px;
  white-space: nowrap;
  font-variant-numeric: tabular-nums;
}

.distnb-bar {
  flex: 1;
  height: 6px;
  border-radius: 3px;
  background: var(--jp-layout-color3);
  overflow: hidden;
}

.distnb-part {
  display: block;
  min-width: 2px;
  height: 100%;
  background: var(--jp-brand-color1);
}

.distnb-section {
  margin-top: 8px;
  padding-top: 6px;
  border-top: var(--jp-border-width) solid var(--jp-border-color2);
}

.distnb-curve {
  margin: 4px 0 8px;
}

.distnb-curve figcaption {
  white-space: pre-wrap;
  font-size: var(--jp-ui-font-size0);
  font-variant-numeric: tabular-nums;
}

.distnb-curve svg {
  display: block;
  width: 100%;
  background: var(--jp-layout-color2);
}

.distnb-curve path {
  fill: none;
  stroke-width: 1.6;
  stroke-linecap: round;
  stroke-linejoin: round;
}

.distnb-panel pre {
  margin: 4px 0 8px;
  padding: 6px;
  overflow: auto;
  font-family: var(--jp-code-font-family);
  font-size: var(--jp-code-font-size);
  line-height: var(--jp-code-line-height);
  background: var(--jp-layout-color2);
}

.jp-Cell[data-distnb] > .jp-CellHeader {
  height: auto;
}

.distnb-mark {
  width: fit-content;
  margin-left: auto;
  padding: 0 6px;
  font-family: var(--jp-ui-font-family);
  font-size: var(--jp-ui-font-size0);
  color: var(--jp-ui-font-color2);
}

/* The badge shows a cell's state in words. The edge shows it by colour and line style. */
.jp-Cell[data-distnb] .jp-InputArea-editor {
  border-left: 4px double var(--jp-border-color0);
}

.jp-Cell[data-distnb='running'] .jp-InputArea-editor {
  border-left: 4px solid var(--jp-brand-color1);
}

.jp-Cell[data-distnb='failed'] .jp-InputArea-editor,
.jp-Cell[data-distnb='the-kernel-ended'] .jp-InputArea-editor {
  border-left: 4px dashed var(--jp-error-color1);
}

.jp-Cell[data-distnb='interrupted'] .jp-InputArea-editor {
  border-left: 4px dotted var(--jp-warn-color1);
}

.jp-Cell[data-distnb='ended'] .jp-InputArea-editor {
  border-left: 4px solid var(--jp-border-color0);
}

.distnb-picker {
  position: relative;
  align-items: center;
  justify-content: center;
  width: 24px;
}

.distnb-picker:hover {
  background: var(--jp-layout-color2);
}

.distnb-picker:focus-within {
  outline: 2px solid var(--jp-brand-color1);
}

.distnb-select {
  position: absolute;
  inset: 0;
  width: 100%;
  opacity: 0;
  cursor: pointer;
}

.distnb-status {
  border: 0;
  height: 100%;
  padding: 0 6px;
  color: inherit;
  background: transparent;
  font: inherit;
  vertical-align: top;
  cursor: pointer;
}
`,""]),r.d(e,{},{A:a})},314(t){t.exports=function(t){var e=[];return e.toString=function(){return this.map(function(e){var r="",n=void 0!==e[5];return e[4]&&(r+="@supports (".concat(e[4],") {")),e[2]&&(r+="@media ".concat(e[2]," {")),n&&(r+="@layer".concat(e[5].length>0?" ".concat(e[5]):""," {")),r+=t(e),n&&(r+="}"),e[2]&&(r+="}"),e[4]&&(r+="}"),r}).join("")},e.i=function(t,r,n,o,i){"string"==typeof t&&(t=[[null,t,void 0]]);var a={};if(n)for(var s=0;s<this.length;s++){var p=this[s][0];null!=p&&(a[p]=!0)}for(var d=0;d<t.length;d++){var l=[].concat(t[d]);n&&a[l[0]]||(void 0!==i&&(void 0===l[5]||(l[1]="@layer".concat(l[5].length>0?" ".concat(l[5]):""," {").concat(l[1],"}")),l[5]=i),r&&(l[2]&&(l[1]="@media ".concat(l[2]," {").concat(l[1],"}")),l[2]=r),o&&(l[4]?(l[1]="@supports (".concat(l[4],") {").concat(l[1],"}"),l[4]=o):l[4]="".concat(o)),e.push(l))}},e}},601(t){t.exports=function(t){return t[1]}},72(t){var e=[];function r(t){for(var r=-1,n=0;n<e.length;n++)if(e[n].identifier===t){r=n;break}return r}function n(t,n){for(var o={},i=[],a=0;a<t.length;a++){var s=t[a],p=n.base?s[0]+n.base:s[0],d=o[p]||0,l="".concat(p," ").concat(d);o[p]=d+1;var c=r(l),u={css:s[1],media:s[2],sourceMap:s[3],supports:s[4],layer:s[5]};if(-1!==c)e[c].references++,e[c].updater(u);else{var b=function(t,e){var r=e.domAPI(e);return r.update(t),function(e){e?(e.css!==t.css||e.media!==t.media||e.sourceMap!==t.sourceMap||e.supports!==t.supports||e.layer!==t.layer)&&r.update(t=e):r.remove()}}(u,n);n.byIndex=a,e.splice(a,0,{identifier:l,updater:b,references:1})}i.push(l)}return i}t.exports=function(t,o){var i=n(t=t||[],o=o||{});return function(t){t=t||[];for(var a=0;a<i.length;a++){var s=r(i[a]);e[s].references--}for(var p=n(t,o),d=0;d<i.length;d++){var l=r(i[d]);0===e[l].references&&(e[l].updater(),e.splice(l,1))}i=p}}},659(t){var e={};t.exports=function(t,r){var n=function(t){if(void 0===e[t]){var r=document.querySelector(t);if(window.HTMLIFrameElement&&r instanceof window.HTMLIFrameElement)try{r=r.contentDocument.head}catch(t){r=null}e[t]=r}return e[t]}(t);if(!n)throw Error("Couldn't find a style target. This probably means that the value for the 'insert' parameter is invalid.");n.appendChild(r)}},540(t){t.exports=function(t){var e=document.createElement("style");return t.setAttributes(e,t.attributes),t.insert(e,t.options),e}},56(t,e,r){t.exports=function(t){var e=r.nc;e&&t.setAttribute("nonce",e)}},825(t){t.exports=function(t){if("u"<typeof document)return{update:function(){},remove:function(){}};var e=t.insertStyleElement(t);return{update:function(r){var n,o,i;n="",r.supports&&(n+="@supports (".concat(r.supports,") {")),r.media&&(n+="@media ".concat(r.media," {")),(o=void 0!==r.layer)&&(n+="@layer".concat(r.layer.length>0?" ".concat(r.layer):""," {")),n+=r.css,o&&(n+="}"),r.media&&(n+="}"),r.supports&&(n+="}"),(i=r.sourceMap)&&"u">typeof btoa&&(n+="\n/*# sourceMappingURL=data:application/json;base64,".concat(btoa(unescape(encodeURIComponent(JSON.stringify(i))))," */")),t.styleTagTransform(n,e,t.options)},remove:function(){var t;null===(t=e).parentNode||t.parentNode.removeChild(t)}}}},113(t){t.exports=function(t,e){if(e.styleSheet)e.styleSheet.cssText=t;else{for(;e.firstChild;)e.removeChild(e.firstChild);e.appendChild(document.createTextNode(t))}}},579(t,e,r){var n=r(72),o=r.n(n),i=r(825),a=r.n(i),s=r(659),p=r.n(s),d=r(56),l=r.n(d),c=r(540),u=r.n(c),b=r(113),f=r.n(b),v=r(475),h={};h.styleTagTransform=f(),h.setAttributes=l(),h.insert=p().bind(null,"head"),h.domAPI=a(),h.insertStyleElement=u(),o()(v.A,h),v.A&&v.A.locals&&v.A.locals}}]);