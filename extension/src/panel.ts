// The side panel: the replicas of the notebook that is in front.

import { NotebookActions, NotebookPanel } from '@jupyterlab/notebook';
import { Signal } from '@lumino/signaling';
import { Widget } from '@lumino/widgets';
import { curve, element, engineRow } from './dom';
import { icon } from './icon';
import { KernelLink } from './kernel';

const LINES = '%load_ext distnb\n%distnb start';

export class ReplicasPanel extends Widget {
  /** Emitted when another notebook's replicas are shown, or they have news. */
  readonly changed = new Signal<this, void>(this);

  constructor() {
    super();
    this.id = 'distnb-panel';
    this.title.icon = icon;
    this.title.caption = 'Replicas (distnb)';
    this.addClass('distnb-panel');
    this._count.type = 'number';
    this._count.min = '1';
    this._count.placeholder = 'auto';
    this._count.setAttribute('aria-label', 'Number of engines; empty: one for each GPU, else two on the CPU');
    this._head.setAttribute('role', 'status');
    this._error.setAttribute('role', 'alert');
    this._stacks.tabIndex = 0;
    this._stacks.setAttribute('aria-label', 'Stacks');
    const start = { n: () => (this._count.value ? Number(this._count.value) : null) };
    this._buttons = {
      start: this._button('Start', 'Start engines', link => link.order('start', { n: start.n() })),
      stop: this._button('Stop', 'End the engines, and the cell that uses them', link => link.order('stop')),
      interrupt: this._button('Interrupt', 'End what runs; the engines stay', link => link.interrupt()),
      stacks: this._button('Stacks', 'Where each replica is in its program', async link => {
        this._stacks.textContent = (await link.order('stacks')).text;
      })
    };
    const { start: begin, ...others } = this._buttons;
    this._cluster.append(
      element('div', 'distnb-buttons', begin, this._count, ...Object.values(others)),
      this._head,
      this._engines,
      this._more,
      this._stacks
    );
    const insert = element('button', 'jp-mod-styled', 'Insert as a cell');
    insert.onclick = () => this._insert();
    this._absent.append(
      element('p', '', 'The kernel of this notebook has not loaded distnb. Type:'),
      element('pre', '', LINES),
      insert
    );
    this.node.append(element('h2', '', 'Replicas'), this._notebook, this._absent, this._error, this._cluster);
    this.follow(null);
  }

  /** What the kernel told last. */
  get link(): KernelLink | null {
    return this._link;
  }

  /** Show the replicas of a notebook. */
  follow(panel: NotebookPanel | null): void {
    this._panel?.sessionContext.kernelChanged.disconnect(this._connect, this);
    this._panel = panel;
    panel?.sessionContext.kernelChanged.connect(this._connect, this);
    this._connect();
  }

  private _connect(): void {
    this._link?.changed.disconnect(this._draw, this);
    const kernel = this._panel?.isDisposed ? null : this._panel?.sessionContext.session?.kernel;
    this._link = kernel ? KernelLink.of(kernel) : null;
    this._link?.changed.connect(this._draw, this);
    this._stacks.textContent = this._failure = '';
    this._draw();
  }

  private _draw(): void {
    const told = this._link?.snapshot ?? null;
    this._notebook.textContent = this._panel ? this._panel.title.label : 'Open a notebook to see its replicas.';
    this._absent.hidden = !this._link || told !== null;
    this._cluster.hidden = told === null;
    this._error.textContent = this._failure || told?.error || '';
    this._error.hidden = !this._error.textContent;
    const engines = told?.engines ?? null;
    const busy = Boolean(told?.doing);
    this._buttons.start.disabled = this._count.disabled = busy || engines !== null;
    this._buttons.stop.disabled = busy || engines === null;
    this._buttons.interrupt.disabled = engines === null;
    this._buttons.stacks.disabled = engines === null;
    this._head.textContent =
      told?.doing || told?.head || (engines ? `${engines.length} engines are ready.` : 'No engines are running.');
    this._engines.replaceChildren(...(engines ?? []).map(engineRow));
    this._more.replaceChildren(
      ...(told?.told ?? []).map(line => element('div', 'distnb-told', line)),
      ...(told?.curves ?? []).map(each => curve(each.name, each.lines))
    );
    this._stacks.hidden = !this._stacks.textContent;
    this.changed.emit();
  }

  private _button(label: string, title: string, action: (link: KernelLink) => Promise<unknown>): HTMLButtonElement {
    const button = element('button', 'jp-mod-styled', label);
    button.title = title;
    button.onclick = async () => {
      this._failure = '';
      try {
        if (this._link) {
          await action(this._link);
        }
      } catch (error) {
        this._failure = (error as Error).message;
      }
      this._draw();
    };
    return button;
  }

  private _insert(): void {
    const notebook = this._panel?.content;
    if (notebook) {
      notebook.activeCellIndex = 0;
      NotebookActions.insertAbove(notebook);
      notebook.activeCell?.model.sharedModel.setSource(LINES);
    }
  }

  private _panel: NotebookPanel | null = null;
  private _link: KernelLink | null = null;
  private _failure = '';
  private _buttons: { [name in 'start' | 'stop' | 'interrupt' | 'stacks']: HTMLButtonElement };
  private _count = element('input', 'jp-mod-styled');
  private _notebook = element('p', 'distnb-notebook');
  private _absent = element('div', 'distnb-absent');
  private _cluster = element('div');
  private _error = element('p', 'distnb-error');
  private _head = element('p', 'distnb-head');
  private _engines = element('ul', 'distnb-engines');
  private _more = element('div');
  private _stacks = element('pre', 'distnb-stacks');
}
