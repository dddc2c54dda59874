"use strict";(self.rspackChunkdistnb=self.rspackChunkdistnb||[]).push([[232],{475(t,r,e){var o=e(601),n=e.n(o),a=e(314),i=(e.n(a))()(n());i.push([t.id,`.distnb-panel {
  padding: 8px 12px;
  overflow: auto;
  min-width: 220px;
  color: var(--jp-ui-font-color1);
  background: var(--jp-layout-color1);
  font-size: var(--jp-ui-font-size1);
}

.distnb-panel [hidden] {
  display: none;
}

.distnb-panel h2 {
  font-size: var(--jp-ui-font-size1);
  margin: 0;
  text-transform: uppercase;
  letter-spacing: 0.05em;
}

.distnb-panel p {
  margin: 4px 0 8px;
}

.distnb-notebook,
.distnb-at,
.distnb-memory,
.distnb-told {
  color: var(--jp-ui-font-color2);
}

.distnb-buttons {
  display: flex;
  flex-wrap: wrap;
  gap: 4px;
}

.distnb-panel button.jp-mod-styled,
.distnb-panel input.jp-mod-styled {
  height: 24px;
  line-height: 22px;
  padding: 0 8px;
  font-size: var(--jp-ui-font-size1);
  color: var(--jp-ui-font-color1);
  background: var(--jp-layout-color2);
  border: 1px solid var(--jp-border-color1);
}

.distnb-panel input.jp-mod-styled {
  width: 56px;
  background: var(--jp-input-background, var(--jp-layout-color1));
}

.distnb-panel button.jp-mod-styled:disabled {
  opacity: 0.45;
}

.distnb-panel button:focus-visible,
.distnb-panel pre:focus-visible,
.distnb-panel input:focus-visible,
.distnb-select:focus-visible,
.distnb-status:focus-visible {
  outline: 2px solid var(--jp-brand-color1);
  outline-offset: 1px;
}

.distnb-error {
  color: var(--jp-error-color0, var(--jp-error-color1));
  white-space: pre-wrap;
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
  border-top: 1px solid var(--jp-border-color2);
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
}

.distnb-bar {
  flex: 1;
  height: 6px;
  background: var(--jp-layout-color3);
}

.distnb-part {
  display: block;
  height: 100%;
  background: var(--jp-brand-color1);
}

.distnb-curve {
  margin: 0 0 8px;
}

.distnb-curve figcaption {
  white-space: pre-wrap;
  font-size: var(--jp-ui-font-size0);
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

/* A cell's state is its badge's words; the edge shows it from afar, and differs by its line too. */
.jp-Cell[data-distnb] .jp-InputArea-editor {
  border-left: 4px double var(--jp-border-color0);
}

.jp-Cell[data-distnb='running'] .jp-InputArea-editor {
  border-left: 4px solid var(--jp-brand-color1);
}

.jp-Cell[data-distnb='failed'] .jp-InputArea-editor {
  border-left: 4px dashed var(--jp-error-color1);
}

.jp-Cell[data-distnb='interrupted'] .jp-InputArea-editor {
  border-left: 4px dotted var(--jp-warn-color1);
}

.jp-Cell[data-distnb='ended'] .jp-InputArea-editor {
  border-left: 4px solid var(--jp-border-color0);
}

.distnb-select {
  height: 22px;
  font-size: var(--jp-ui-font-size0);
  color: var(--jp-ui-font-color1);
  background: var(--jp-layout-color1);
  border: 1px solid var(--jp-border-color1);
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
`,""]),e.d(r,{},{A:i})},314(t){t.exports=function(t){var r=[];return r.toString=function(){return this.map(function(r){var e="",o=void 0!==r[5];return r[4]&&(e+="@supports (".concat(r[4],") {")),r[2]&&(e+="@media ".concat(r[2]," {")),o&&(e+="@layer".concat(r[5].length>0?" ".concat(r[5]):""," {")),e+=t(r),o&&(e+="}"),r[2]&&(e+="}"),r[4]&&(e+="}"),e}).join("")},r.i=function(t,e,o,n,a){"string"==typeof t&&(t=[[null,t,void 0]]);var i={};if(o)for(var s=0;s<this.length;s++){var p=this[s][0];null!=p&&(i[p]=!0)}for(var d=0;d<t.length;d++){var l=[].concat(t[d]);o&&i[l[0]]||(void 0!==a&&(void 0===l[5]||(l[1]="@layer".concat(l[5].length>0?" ".concat(l[5]):""," {").concat(l[1],"}")),l[5]=a),e&&(l[2]&&(l[1]="@media ".concat(l[2]," {").concat(l[1],"}")),l[2]=e),n&&(l[4]?(l[1]="@supports (".concat(l[4],") {").concat(l[1],"}"),l[4]=n):l[4]="".concat(n)),r.push(l))}},r}},601(t){t.exports=function(t){return t[1]}},72(t){var r=[];function e(t){for(var e=-1,o=0;o<r.length;o++)if(r[o].identifier===t){e=o;break}return e}function o(t,o){for(var n={},a=[],i=0;i<t.length;i++){var s=t[i],p=o.base?s[0]+o.base:s[0],d=n[p]||0,l="".concat(p," ").concat(d);n[p]=d+1;var c=e(l),u={css:s[1],media:s[2],sourceMap:s[3],supports:s[4],layer:s[5]};if(-1!==c)r[c].references++,r[c].updater(u);else{var f=function(t,r){var e=r.domAPI(r);return e.update(t),function(r){r?(r.css!==t.css||r.media!==t.media||r.sourceMap!==t.sourceMap||r.supports!==t.supports||r.layer!==t.layer)&&e.update(t=r):e.remove()}}(u,o);o.byIndex=i,r.splice(i,0,{identifier:l,updater:f,references:1})}a.push(l)}return a}t.exports=function(t,n){var a=o(t=t||[],n=n||{});return function(t){t=t||[];for(var i=0;i<a.length;i++){var s=e(a[i]);r[s].references--}for(var p=o(t,n),d=0;d<a.length;d++){var l=e(a[d]);0===r[l].references&&(r[l].updater(),r.splice(l,1))}a=p}}},659(t){var r={};t.exports=function(t,e){var o=function(t){if(void 0===r[t]){var e=document.querySelector(t);if(window.HTMLIFrameElement&&e instanceof window.HTMLIFrameElement)try{e=e.contentDocument.head}catch(t){e=null}r[t]=e}return r[t]}(t);if(!o)throw Error("Couldn't find a style target. This probably means that the value for the 'insert' parameter is invalid.");o.appendChild(e)}},540(t){t.exports=function(t){var r=document.createElement("style");return t.setAttributes(r,t.attributes),t.insert(r,t.options),r}},56(t,r,e){t.exports=function(t){var r=e.nc;r&&t.setAttribute("nonce",r)}},825(t){t.exports=function(t){if("u"<typeof document)return{update:function(){},remove:function(){}};var r=t.insertStyleElement(t);return{update:function(e){var o,n,a;o="",e.supports&&(o+="@supports (".concat(e.supports,") {")),e.media&&(o+="@media ".concat(e.media," {")),(n=void 0!==e.layer)&&(o+="@layer".concat(e.layer.length>0?" ".concat(e.layer):""," {")),o+=e.css,n&&(o+="}"),e.media&&(o+="}"),e.supports&&(o+="}"),(a=e.sourceMap)&&"u">typeof btoa&&(o+="\n/*# sourceMappingURL=data:application/json;base64,".concat(btoa(unescape(encodeURIComponent(JSON.stringify(a))))," */")),t.styleTagTransform(o,r,t.options)},remove:function(){var t;null===(t=r).parentNode||t.parentNode.removeChild(t)}}}},113(t){t.exports=function(t,r){if(r.styleSheet)r.styleSheet.cssText=t;else{for(;r.firstChild;)r.removeChild(r.firstChild);r.appendChild(document.createTextNode(t))}}},579(t,r,e){var o=e(72),n=e.n(o),a=e(825),i=e.n(a),s=e(659),p=e.n(s),d=e(56),l=e.n(d),c=e(540),u=e.n(c),f=e(113),b=e.n(f),v=e(475),m={};m.styleTagTransform=b(),m.setAttributes=l(),m.insert=p().bind(null,"head"),m.domAPI=i(),m.insertStyleElement=u(),n()(v.A,m),v.A&&v.A.locals&&v.A.locals}}]);