// The plugin for JupyterLab and Notebook 7. It is optional: distnb also works without the extension.

import { ILayoutRestorer, JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ICommandPalette, IToolbarWidgetRegistry } from '@jupyterlab/apputils';
import { Cell } from '@jupyterlab/cells';
import { INotebookTracker } from '@jupyterlab/notebook';
import { IStatusBar } from '@jupyterlab/statusbar';
import { Widget } from '@lumino/widgets';
import { markCells, StrategyPicker } from './cells';
import { element } from './dom';
import { ReplicasPanel } from './panel';

const SHOW = 'distnb:show-replicas';

const plugin: JupyterFrontEndPlugin<void> = {
  id: 'distnb:plugin',
  description: 'Shows the replicas of a notebook, and marks its distributed cells.',
  autoStart: true,
  requires: [INotebookTracker],
  optional: [ICommandPalette, ILayoutRestorer, IStatusBar, IToolbarWidgetRegistry],
  activate: (
    app: JupyterFrontEnd,
    tracker: INotebookTracker,
    palette: ICommandPalette | null,
    restorer: ILayoutRestorer | null,
    statusBar: IStatusBar | null,
    toolbars: IToolbarWidgetRegistry | null
  ) => {
    const panel = new ReplicasPanel();
    app.shell.add(panel, 'right', { rank: 900, type: 'Replicas' });
    restorer?.add(panel, panel.id);
    tracker.currentChanged.connect((_, current) => panel.follow(current));
    tracker.widgetAdded.connect((_, notebook) => markCells(notebook));
    app.commands.addCommand(SHOW, {
      label: 'Show Replicas (distnb)',
      execute: () => app.shell.activateById(panel.id)
    });
    palette?.addItem({ command: SHOW, category: 'Notebook' });
    toolbars?.addFactory<Cell>('Cell', 'distnb-strategy', cell => new StrategyPicker(cell, tracker));
    if (statusBar) {
      addStatus(app, statusBar, panel);
    }
  }
};

function addStatus(app: JupyterFrontEnd, statusBar: IStatusBar, panel: ReplicasPanel): void {
  const button = element('button', 'distnb-status');
  button.title = 'Show the replicas';
  button.onclick = () => void app.commands.execute(SHOW);
  const item = new Widget();
  item.node.append(button);
  const isActive = () => Boolean(panel.link?.snapshot);
  panel.changed.connect(() => {
    const snapshot = panel.link?.snapshot;
    const engines = snapshot?.engines;
    const failed = (engines ?? []).filter(each => each.kind === 'error').length;
    const state = failed ? `${failed} failed` : snapshot?.running && snapshot.head ? 'running' : 'idle';
    const count = engines && `${engines.length} engine${engines.length > 1 ? 's' : ''}, ${state}`;
    button.textContent = `distnb: ${snapshot?.doing || count || 'no engines'}`;
  });
  statusBar.registerStatusItem('distnb:status', { item, align: 'left', isActive, activeStateChanged: panel.changed as any });
}

export default plugin;
