// The connection to one kernel: its snapshots and the requests to it. The kernel's side is distnb/widgets/panel/.

import { Kernel, KernelMessage } from '@jupyterlab/services';
import { Signal } from '@lumino/signaling';

export interface IEngine {
  engine: number;
  name: string;
  place: string;
  state: string;
  kind: 'idle' | 'running' | 'busy' | 'error';
  at: string;
  memory: { name: string; used: number; total: number | null }[];
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
  /** True if the whole cell runs under the strategy. */
  distributed: boolean;
}

/** The parts of a cell's status line, for example "mirrored", "2 replicas", "running" and ["12.3 s", "step 120"]. */
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
  lines: string[];
  curves: { name: string; lines: ILine[] }[];
  cell: string;
  cells: { [id: string]: IMark };
  doing: string;
  error: string;
}

const NAME = 'distnb';
const REQUEST = 'distnb_request';
const REPLY_TIMEOUT_MS = 3000;
const WARM_UP_CODE = 'torch.nn.Module.f';

export class KernelLink {
  /** Emitted when the snapshot of any kernel has changed. */
  static readonly news = new Signal<typeof KernelLink, void>(KernelLink);
  /** Emitted when this kernel's snapshot has changed. */
  readonly changed = new Signal<this, void>(this);
  /** The kernel's latest snapshot, or null if none was received, for example because distnb is not loaded. */
  snapshot: ISnapshot | null = null;
  /** True if the kernel's process has ended and was not replaced. */
  isDead = false;

  private constructor(private _kernel: Kernel.IKernelConnection) {
    _kernel.iopubMessage.connect(this._onMessage, this);
    _kernel.statusChanged.connect(this._onStatus, this);
    void this._requestSnapshot();
  }

  static of(kernel: Kernel.IKernelConnection): KernelLink {
    let link = KernelLink._links.get(kernel);
    if (!link) {
      link = new KernelLink(kernel);
      KernelLink._links.set(kernel, link);
    }
    return link;
  }

  /** Send a request and return the reply. The kernel also handles it while a cell runs. */
  async request(action: string, more: object = {}): Promise<any> {
    const message = KernelMessage.createMessage({
      msgType: REQUEST as any,
      channel: 'control',
      username: this._kernel.username,
      session: this._kernel.clientId,
      content: { action, ...more } as any
    }) as any;
    const future = this._kernel.sendControlMessage(message, true);
    const timeout = new Promise<never>((_, reject) =>
      setTimeout(() => reject(new Error('The kernel does not reply.')), REPLY_TIMEOUT_MS)
    );
    timeout.catch(() => future.dispose());
    const { content } = (await Promise.race([future.done, timeout])) as any;
    if (content.error) {
      throw new Error(content.error);
    }
    return content;
  }

  /** Interrupt the program on the replicas or, without one, the kernel's cell. */
  async interrupt(): Promise<void> {
    const done = await this.request('interrupt').catch(() => ({}));
    if (!done.interrupted) {
      await this._kernel.interrupt();
    }
  }

  /**
   * Request a snapshot if the kernel has already loaded distnb. A kernel that runs a cell replies late, but sends
   * snapshots anyway.
   */
  private async _requestSnapshot(): Promise<void> {
    try {
      const reply = await this._kernel.requestCommInfo({ target_name: NAME });
      if ('comms' in reply.content && NAME in reply.content.comms) {
        this._update((await this.request('snapshot')).snapshot);
      }
    } catch {
      // The kernel has ended, or belongs to another language.
    }
  }

  private _onMessage(_: unknown, message: KernelMessage.IIOPubMessage): void {
    const content = message.content as any;
    if (message.header.msg_type === 'comm_msg' && content.comm_id === NAME) {
      this._session = message.header.session;
      if (this._session !== this._endedSession) {
        this._update(content.data[NAME]);
      }
    }
  }

  private _onStatus(_: unknown, status: Kernel.Status): void {
    const wasDead = this.isDead;
    this.isDead = status === 'dead' || (wasDead && status === 'unknown');
    if (status === 'restarting' || status === 'autorestarting' || wasDead !== this.isDead) {
      this._endedSession = this._session;
      this._update(null);
    }
  }

  private _update(snapshot: ISnapshot | null): void {
    if (snapshot && !this._isWarm) {
      // A kernel's first completion loads a library. On a busy machine, that exceeds JupyterLab's limit, and Tab would
      // show nothing.
      void this._kernel.requestComplete({ code: WARM_UP_CODE, cursor_pos: WARM_UP_CODE.length }).catch(() => undefined);
    }
    this._isWarm = snapshot !== null;
    this.snapshot = snapshot;
    this.changed.emit();
    KernelLink.news.emit();
  }

  private _isWarm = false;
  /** The session id of the process that sent the latest snapshot. */
  private _session = '';
  /** The session id of the process that ended last. Its late snapshots are ignored. */
  private _endedSession = '';
  private static _links = new WeakMap<Kernel.IKernelConnection, KernelLink>();
}
