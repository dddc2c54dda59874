// The HTML elements of the panel and of the marks. Text is always set as text, never as HTML.

import { IEngine, IHead, ILine } from './kernel';

export function element<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  className = '',
  ...content: (Node | string)[]
): HTMLElementTagNameMap[K] {
  const made = document.createElement(tag);
  made.className = className;
  made.append(...content);
  return made;
}

/** States differ by shape and word, not by colour alone. */
const SHAPES = { idle: '○', running: '●', busy: '◐', error: '✕' };

/** Return a part of the panel with a title. */
export function sectionOf(title: HTMLElement, ...content: HTMLElement[]): HTMLElement {
  return element('section', 'distnb-section', title, ...content);
}

/** Return two lines on the latest cell: its title and state, and its counts. */
export function headRow({ title, count, state, facts }: IHead): HTMLElement[] {
  const kind =
    { starting: 'running', running: 'running', asks: 'busy', 'cleaning up': 'busy', failed: 'error', died: 'error' }[
      state
    ] ?? 'idle';
  const stateText = element('span', `distnb-state distnb-mod-${kind}`, `${SHAPES[kind as IEngine['kind']]} ${state}`);
  const counted = [count, ...facts].map(fact => element('span', '', fact));
  return [
    element('div', 'distnb-title', element('span', 'distnb-name', title), stateText),
    element('div', 'distnb-facts', ...counted)
  ];
}

export function engineRow(engine: IEngine): HTMLElement {
  const state = element('span', `distnb-state distnb-mod-${engine.kind}`, `${SHAPES[engine.kind]} ${engine.state}`);
  state.title = engine.at ? `${engine.state}: ${engine.at}` : engine.state;
  const [name, place] = [element('span', 'distnb-name', engine.name), element('span', '', engine.place)];
  const row = element('li', 'distnb-engine', name, place, state);
  if (engine.at) {
    row.append(element('span', 'distnb-at', engine.at));
  }
  row.append(...engine.memory.map(memoryRow));
  return row;
}

/** Return a bar whose full length is the total memory, or only text if the total is unknown. */
function memoryRow({ name, used, total }: IEngine['memory'][number]): HTMLElement {
  if (total === null) {
    return element('span', 'distnb-memory', `${human(used)} ${name}`);
  }
  const part = element('span', 'distnb-part');
  part.style.width = `${(100 * used) / total}%`;
  const bar = element('span', 'distnb-bar', part);
  bar.setAttribute('aria-hidden', 'true');
  return element('span', 'distnb-memory', bar, `${human(used)} of ${human(total)} ${name}`);
}

function human(nbytes: number): string {
  return nbytes < 1e9 ? `${(nbytes / 1e6).toFixed(0)} MB` : `${(nbytes / 1e9).toFixed(1)} GB`;
}

const SVG = 'http://www.w3.org/2000/svg';
/** The live view's colours, so that a replica has one colour everywhere. Dashes distinguish lines without colour. */
const COLORS = ['#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9', '#999933', '#808080'];
const [WIDTH, HEIGHT] = [220, 44];

export function curve(name: string, lines: ILine[]): HTMLElement {
  const all = lines.flatMap(line => line.points);
  const [left, right] = span(all.map(point => point[0]));
  const [low, high] = span(all.flatMap(point => (point[1] === null ? [] : [point[1]])));
  const svg = document.createElementNS(SVG, 'svg');
  svg.setAttribute('viewBox', `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute('role', 'img');
  const values = lines.map(line => (lines.length > 1 ? `${line.mark} ${line.last}` : line.last)).join('  ');
  svg.setAttribute('aria-label', `${name}: ${values}`);
  lines.forEach((line, place) => {
    let broken = true;
    const path = line.points.map(([step, value]) => {
      const begin = broken;
      broken = value === null;
      const x = 2 + ((step - left) / (right - left)) * (WIDTH - 4);
      const y = HEIGHT - 2 - (((value ?? 0) - low) / (high - low)) * (HEIGHT - 4);
      return broken ? '' : `${begin ? 'M' : 'L'}${x.toFixed(1)} ${y.toFixed(1)}`;
    });
    const drawn = document.createElementNS(SVG, 'path');
    drawn.setAttribute('d', path.join('') + (line.points.length === 1 ? 'h0' : ''));
    drawn.setAttribute('stroke', COLORS[line.first % COLORS.length]);
    drawn.setAttribute('stroke-dasharray', ['', '6 3', '2 3'][place % 3]);
    svg.append(drawn);
  });
  return element('figure', 'distnb-curve', element('figcaption', '', `${name}  ${values}`), svg);
}

function span(values: number[]): [number, number] {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  return high > low ? [low, high] : [Number.isFinite(low) ? low - 0.5 : 0, Number.isFinite(low) ? low + 0.5 : 1];
}
