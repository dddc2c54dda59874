// Marks on distributed cells, with their strategy and their replicas' states, and a picker that writes the magic line.

import { Cell, CodeCellModel, ICellModel } from '@jupyterlab/cells';
import { INotebookTracker, NotebookActions, NotebookPanel } from '@jupyterlab/notebook';
import { Signal } from '@lumino/signaling';
import { Widget } from '@lumino/widgets';
import { element } from './dom';
import { icon } from './icon';
import { IMark, KernelLink } from './kernel';

/** The magics that run the rest of their cell as a cell, and so may precede %%distribute; and any other cell magic. */
const PRECEDING = /^(?:\s*%%(?:time|timeit|capture|prun)\b.*(?:\n|$))*\s*/;
const MAGIC = /^%%distribute(?:[ \t]+(\S+))?/;
const OTHER_MAGIC = /^%%(?!distribute\b)/;
const STRATEGIES = [
  'default',
  'one_device',
  'mirrored',
  'multi_worker',
  'central_storage',
  'parameter_server',
  'sharded',
  'tpu'
];

/** Return the lines with magics that may precede %%distribute, and the rest of a cell's source. */
function divided(source: string): [string, string] {
  const above = PRECEDING.exec(source)![0];
  return [above && !above.endsWith('\n') ? `${above}\n` : above, source.slice(above.length)];
}

/** Return the strategy's name in a cell's magic line, "" if it is missing, or null for an ordinary cell. */
export function strategyOf(source: string): string | null {
  const found = MAGIC.exec(divided(source)[1]);
  return found && (found[1] ?? '');
}

/** Return a cell's source with another strategy and the same options, or without the magic line if `word` is null. */
export function withStrategy(source: string, word: string | null): string {
  const [above, rest] = divided(source);
  if (word === null) {
    return above + rest.replace(/^%%distribute.*\n?/, '');
  }
  return above + (MAGIC.test(rest) ? rest.replace(MAGIC, `%%distribute ${word}`) : `%%distribute ${word}\n${rest}`);
}

/** Mark the distributed cells of a notebook while it is open. */
export function markCells(panel: NotebookPanel): void {
  let link: KernelLink | null = null;
  let planned = 0;
  // The latest mark of each cell, also after the end of the kernel that sent it. Running a cell again removes its mark.
  const marks: { [id: string]: IMark } = {};
  const draw = () => {
    planned = 0;
    if (panel.isDisposed) {
      return;
    }
    Object.assign(marks, link?.snapshot?.cells);
    for (const cell of panel.content.widgets) {
      const id = cell.model.id;
      if (marks[id] && UNFINISHED.includes(marks[id].state) && !link?.snapshot?.cells[id]) {
        marks[id] = { ...marks[id], state: 'the kernel ended' };
      }
      markCell(cell, marks[id]);
    }
  };
  const plan = () => {
    planned = planned || requestAnimationFrame(draw);
  };
  const connect = () => {
    link?.changed.disconnect(plan);
    const kernel = panel.sessionContext.session?.kernel;
    link = kernel ? KernelLink.of(kernel) : null;
    link?.changed.connect(plan);
    plan();
  };
  const forget = (_: unknown, { cell }: { cell: Cell }) => {
    delete marks[cell.model.id];
    plan();
  };
  panel.sessionContext.kernelChanged.connect(connect);
  panel.content.modelContentChanged.connect(plan);
  NotebookActions.executionScheduled.connect(forget);
  panel.disposed.connect(() => {
    link?.changed.disconnect(plan);
    NotebookActions.executionScheduled.disconnect(forget);
  });
  void panel.revealed.then(connect);
}

const UNFINISHED = ['starting', 'running', 'asks', 'cleaning up'];

/** Return the state of a cell without a mark, derived from its saved outputs. */
function savedState(model: ICellModel): string {
  if (!(model instanceof CodeCellModel)) {
    return 'not run';
  }
  const outputs = model.outputs.toJSON();
  const error = outputs.find(output => output.output_type === 'error');
  if (error) {
    return error.ename === 'KeyboardInterrupt' ? 'interrupted' : 'failed';
  }
  return model.executionCount !== null ? 'ended' : outputs.length ? 'not finished' : 'not run';
}

function markCell(cell: Cell, mark: IMark | undefined): void {
  // A cell under %autodistribute has no magic line.
  const own = cell.model.type === 'code' ? strategyOf(cell.model.sharedModel.getSource()) : null;
  const word = own ?? (mark?.distributed ? mark.title : null);
  const badge = cell.node.querySelector('.distnb-mark');
  if (word === null) {
    badge?.remove();
    delete cell.node.dataset.distnb;
    return;
  }
  const state = mark?.state ?? savedState(cell.model);
  cell.node.dataset.distnb = state.replaceAll(' ', '-');
  const count = mark?.replicas.length ?? 0;
  const parts = [word || mark?.title || 'distributed', ...(count ? [`${count} replica${count > 1 ? 's' : ''}`] : [])];
  const text = [...parts, state].join(' · ');
  const states = mark ? mark.replicas.map(line => `replica ${line}`).join('\n') : '';
  const made = badge ?? element('div', 'distnb-mark');
  if (made.textContent !== text || made.getAttribute('title') !== states) {
    made.textContent = text;
    made.setAttribute('title', states);
    made.setAttribute('aria-label', `Distributed cell: ${text}. ${states}`);
  }
  if (!badge) {
    const header = cell.node.querySelector('.jp-CellHeader');
    header?.append(made);
  }
}

/** The strategy picker in a cell's toolbar, shown if the kernel has loaded distnb or the cell has the magic line. */
export class StrategyPicker extends Widget {
  constructor(
    private _cell: Cell<ICellModel>,
    private _tracker: INotebookTracker
  ) {
    super();
    this.addClass('distnb-picker');
    this._select.setAttribute('aria-label', 'Strategy of this cell');
    this._select.title = 'Strategy of this cell: writes the line %%distribute';
    this._select.onchange = () => {
      const shared = this._cell.model.sharedModel;
      shared.setSource(withStrategy(shared.getSource(), this._select.value || null));
    };
    // The picker is small, because JupyterLab hides a toolbar that is wider than half of the cell.
    icon.element({ container: this.node, tag: 'span', width: '16px', height: '16px' });
    this.node.append(this._select);
    _cell.model.contentChanged.connect(this._draw, this);
    KernelLink.news.connect(this._draw, this);
    this._draw();
  }

  override dispose(): void {
    Signal.clearData(this);
    super.dispose();
  }

  protected override onAfterAttach(): void {
    this._draw();
  }

  private _draw(): void {
    if (this._cell.isDisposed) {
      return;
    }
    const source = this._cell.model.sharedModel.getSource();
    const word = strategyOf(source);
    const notebook = this._tracker.find(panel => panel.content.widgets.includes(this._cell));
    const kernel = notebook?.sessionContext.session?.kernel;
    const known = word !== null || Boolean(kernel && KernelLink.of(kernel).snapshot);
    this.setHidden(this._cell.model.type !== 'code' || !known || OTHER_MAGIC.test(divided(source)[1]));
    if (this._drawn === word) {
      return; // replacing the options would close an open list
    }
    this._drawn = word;
    const words = word && !STRATEGIES.includes(word) ? [...STRATEGIES, word] : STRATEGIES;
    const options = words.map(each => new Option(each, each, false, each === word));
    this._select.replaceChildren(new Option('not distributed', '', false, word === null), ...options);
  }

  private _select = element('select', 'distnb-select');
  private _drawn: string | null | undefined;
}
