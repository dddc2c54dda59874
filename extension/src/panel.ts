// The side panel, which shows the replicas of the current notebook.

import { NotebookActions, NotebookPanel } from '@jupyterlab/notebook';
import { closeIcon, LabIcon, listIcon, runIcon, SidePanel, stopIcon, ToolbarButton } from '@jupyterlab/ui-components';
import { Signal } from '@lumino/signaling';
import { Panel, Widget } from '@lumino/widgets';
import { curve, element, engineRow, headRow, sectionOf } from './dom';
import { icon } from './icon';
import { KernelLink } from './kernel';

const LINES = '%load_ext distnb\n%distnb start';

export class ReplicasPanel extends SidePanel {
  /** Emitted when the panel shows another notebook or a new snapshot. */
  readonly changed = new Signal<this, void>(this);

  constructor() {
    super({ content: new Panel() });
    this.id = 'distnb-panel';
    this.title.icon = icon;
    this.title.caption = 'Replicas (distnb)';
    this.addClass('distnb-panel');
    this.header.addWidget(new Widget({ node: element('h2', '', 'Replicas') }));
    this._count.type = 'number';
    this._count.min = '1';
    this._count.placeholder = 'auto';
    this._count.title = 'Number of engines; empty: one for each GPU, else two on the CPU';
    this._count.setAttribute('aria-label', this._count.title);
    this._head.setAttribute('role', 'status');
    this._error.setAttribute('role', 'alert');
    this._stacks.tabIndex = 0;
    this._stacks.setAttribute('aria-label', 'Stacks');
    const number = () => (this._count.value ? Number(this._count.value) : null);
    this._buttons = {
      start: this._button('Start engines', runIcon, link => link.request('start', { n: number() })),
      interrupt: this._button('Interrupt the running program; the engines remain', stopIcon, link => link.interrupt()),
      stop: this._button('Stop the running program and the engines', closeIcon, link => link.request('stop')),
      stacks: this._button('Stacks: where each replica is in its program', listIcon, async link => {
        this._stacks.textContent = (await link.request('stacks')).text;
        this._stacksTitle.textContent = `Stacks at ${new Date().toLocaleTimeString()}`;
      })
    };
    this.toolbar.node.setAttribute('aria-label', 'Engines');
    this.toolbar.addItem('start', this._buttons.start);
    this.toolbar.addItem('count', new Widget({ node: element('div', 'distnb-count', this._count) }));
    this.toolbar.addItem('interrupt', this._buttons.interrupt);
    this.toolbar.addItem('stop', this._buttons.stop);
    this.toolbar.addItem('stacks', this._buttons.stacks);
    this._actionButton.onclick = () => void this._action?.();
    this._stacksPart = sectionOf(this._stacksTitle, this._stacks);
    this._cluster.append(this._head, this._engines, this._more, this._stacksPart);
    const content = new Widget();
    content.addClass('distnb-content');
    content.node.append(this._notebook, this._message, this._lines, this._actionButton, this._error, this._cluster);
    this.addWidget(content);
    this.follow(null);
  }

  /** The connection to the current notebook's kernel. */
  get link(): KernelLink | null {
    return this._link;
  }

  /** Show the replicas of a notebook. */
  follow(panel: NotebookPanel | null): void {
    this._panel?.sessionContext.kernelChanged.disconnect(this._connect, this);
    this._panel?.sessionContext.statusChanged.disconnect(this._draw, this);
    this._panel = panel;
    panel?.sessionContext.kernelChanged.connect(this._connect, this);
    panel?.sessionContext.statusChanged.connect(this._draw, this);
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
    const snapshot = this._link?.snapshot ?? null;
    this._notebook.textContent = this._panel?.title.label ?? '';
    this._explain();
    this._cluster.hidden = snapshot === null;
    this._error.textContent = this._failure || snapshot?.error || '';
    const engines = snapshot?.engines ?? null;
    if (snapshot && !engines) {
      this._stacks.textContent = ''; // of a cluster that has ended
    }
    const busy = Boolean(snapshot?.doing);
    this._buttons.start.enabled = snapshot !== null && !busy && engines === null;
    this._count.disabled = !this._buttons.start.enabled;
    this._buttons.stop.enabled = !busy && engines !== null;
    this._buttons.interrupt.enabled = this._buttons.stacks.enabled = engines !== null;
    const ready = engines ? `${engines.length} ${engines.length > 1 ? 'engines are' : 'engine is'} ready.` : 'No engines are running.';
    this._head.replaceChildren(...(snapshot?.doing || !snapshot?.head ? [snapshot?.doing || ready] : headRow(snapshot.head)));
    this._engines.replaceChildren(...(engines ?? []).map(engineRow));
    this._more.replaceChildren(
      ...(snapshot?.lines ?? []).map(line => element('div', 'distnb-line', line)),
      ...(snapshot?.curves.length ? [sectionOf(element('h3', '', 'Values'), ...snapshot.curves.map(each => curve(each.name, each.lines)))] : [])
    );
    this._stacksPart.hidden = !this._stacks.textContent;
    this.changed.emit();
  }

  /** If there is nothing to show, show the reason and a button that helps. */
  private _explain(): void {
    const context = this._panel?.sessionContext;
    const starts = ['starting', 'restarting', 'autorestarting', 'connecting'].includes(context?.kernelDisplayStatus ?? '');
    let [message, lines, label] = ['', '', ''];
    if (!this._panel) {
      message = 'Open a notebook to see its replicas.';
    } else if (!this._link || this._link.isDead) {
      message = starts ? 'The kernel is starting …' : 'The kernel of this notebook and its engines have ended.';
      label = starts ? '' : 'Start a kernel';
      this._action = () => (this._link ? context?.restartKernel() : context?.startKernel());
    } else if (!this._link.snapshot) {
      message = 'The kernel of this notebook has not loaded distnb. Run:';
      [lines, label] = [LINES, 'Insert as a cell'];
      this._action = () => this._insert();
    }
    for (const [node, text] of [[this._message, message], [this._lines, lines], [this._actionButton, label]] as const) {
      node.textContent = text;
    }
  }

  private _button(tooltip: string, picture: LabIcon, action: (link: KernelLink) => Promise<unknown>): ToolbarButton {
    const onClick = async () => {
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
    return new ToolbarButton({ icon: picture, tooltip, onClick });
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
  private _action: (() => unknown) | null = null;
  private _buttons: { [name in 'start' | 'stop' | 'interrupt' | 'stacks']: ToolbarButton };
  private _count = element('input', 'jp-mod-styled');
  private _notebook = element('div', 'distnb-notebook');
  private _message = element('p');
  private _lines = element('pre');
  private _actionButton = document.createElement('jp-button');
  private _cluster = element('div');
  private _error = element('p', 'distnb-error');
  private _head = element('div', 'distnb-head');
  private _engines = element('ul', 'distnb-engines');
  private _more = element('div');
  private _stacks = element('pre', 'distnb-stacks');
  private _stacksTitle = element('h3');
  private _stacksPart: HTMLElement;
}
