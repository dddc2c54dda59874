// distnb's icon: three connected replicas.

import { LabIcon } from '@jupyterlab/ui-components';

export const icon = new LabIcon({
  name: 'distnb:replicas',
  svgstr:
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><g class="jp-icon3" fill="none" stroke="#616161" ' +
    'stroke-width="1.4"><circle cx="8" cy="3.2" r="2"/><circle cx="3.2" cy="12.6" r="2"/><circle cx="12.8" cy="12.6" r="2"/>' +
    '<path d="M7 5 4.2 10.8M9 5l2.8 5.8M5.2 12.6h5.6"/></g></svg>'
});
