// What one kernel tells of its replicas, and the orders that it takes. The other end is distnb/widgets/panel/.

import { Kernel, KernelMessage } from '@jupyterlab/services';
import { Signal } from '@lumino/signaling';

export interface IEngine {
  engine: number;
  name: string;
  place: string;
  state: string;
  kind: 'idle' | 'running' | 'busy' | 'error';
  at: string;
  memory: { what: string; taken: number; all: number | null }[];
}

export interface ILine {
  mark: string;
  first: number;
  last: string;
  points: [number, number | null][];
}

export interface IMark {
  title: string;
  state: string;
  replicas: string[];
}

/** Of a cell: "mirrored", "2 replicas", "running", and "12.3 s", "step 120" and so on. */
export interface IHead {
  title: string;
  count: string;
  state: string;
  facts: string[];
}

export interface ISnapshot {
  engines: IEngine[] | null;
  running: boolean;
  head: IHead | null;
  told: string[];
  curves: { name: string; lines: ILine[] }[];
  cell: string;
  cells: { [id: string]: IMark };
  doing: string;
  error: string;
}

const NAME = 'distnb';
const ORDER = 'distnb_order';
const PATIENCE_MS = 3000;
const WARMS = 'torch.nn.Module.f';

export class KernelLink {
  /** Emitted when there is something new of any kernel. */
  static readonly news = new Signal<typeof KernelLink, void>(KernelLink);
  /** Emitted when there is something new to show. */
  readonly changed = new Signal<this, void>(this);
  /** The latest that the kernel told; null while it has not loaded distnb, as far as is known. */
  snapshot: ISnapshot | null = null;
  /** Whether the kernel's process has ended and no other has taken its place. */
  isDead = false;

  private constructor(private _kernel: Kernel.IKernelConnection) {
    _kernel.iopubMessage.connect(this._hear, this);
    _kernel.statusChanged.connect(this._follow, this);
    void this._ask();
  }

  static of(kernel: Kernel.IKernelConnection): KernelLink {
    let link = KernelLink._links.get(kernel);
    if (!link) {
      link = new KernelLink(kernel);
      KernelLink._links.set(kernel, link);
    }
    return link;
  }

  /** Give an order; it is carried out while a cell runs, too. */
  async order(order: string, more: object = {}): Promise<any> {
    const message = KernelMessage.createMessage({
      msgType: ORDER as any,
      channel: 'control',
      username: this._kernel.username,
      session: this._kernel.clientId,
      content: { order, ...more } as any
    }) as any;
    const future = this._kernel.sendControlMessage(message, true);
    const late = new Promise<never>((_, reject) =>
      setTimeout(() => reject(new Error('The kernel does not answer.')), PATIENCE_MS)
    );
    late.catch(() => future.dispose());
    const { content } = (await Promise.race([future.done, late])) as any;
    if (content.error) {
      throw new Error(content.error);
    }
    return content;
  }

  /** End what runs: the program on the replicas, else the cell. */
  async interrupt(): Promise<void> {
    const done = await this.order('interrupt').catch(() => ({}));
    if (!done.interrupted) {
      await this._kernel.interrupt();
    }
  }

  /** A page that was just loaded: has the kernel loaded distnb before? One that runs a cell tells it by itself. */
  private async _ask(): Promise<void> {
    try {
      const reply = await this._kernel.requestCommInfo({ target_name: NAME });
      if ('comms' in reply.content && NAME in reply.content.comms) {
        this._take((await this.order('look')).snapshot);
      }
    } catch {
      // It has ended, or is another language's.
    }
  }

  private _hear(_: unknown, message: KernelMessage.IIOPubMessage): void {
    const content = message.content as any;
    if (message.header.msg_type === 'comm_msg' && content.comm_id === NAME) {
      this._session = message.header.session;
      if (this._session !== this._ended) {
        this._take(content.data[NAME]);
      }
    }
  }

  private _follow(_: unknown, status: Kernel.Status): void {
    const wasDead = this.isDead;
    this.isDead = status === 'dead' || (wasDead && status === 'unknown');
    if (status === 'restarting' || status === 'autorestarting' || wasDead !== this.isDead) {
      this._ended = this._session;
      this._take(null);
    }
  }

  private _take(snapshot: ISnapshot | null): void {
    if (snapshot && !this._isWarm) {
      // The first completion loads its library, longer than JupyterLab waits where the machine is busy: Tab shows nothing.
      void this._kernel.requestComplete({ code: WARMS, cursor_pos: WARMS.length }).catch(() => undefined);
    }
    this._isWarm = snapshot !== null;
    this.snapshot = snapshot;
    this.changed.emit();
    KernelLink.news.emit();
  }

  private _isWarm = false;
  /** Of the process that told the latest, and of the one that ended last: what it told in its end comes late. */
  private _session = '';
  private _ended = '';
  private static _links = new WeakMap<Kernel.IKernelConnection, KernelLink>();
}
