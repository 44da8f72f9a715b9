// Charts of the points that the agent sampled in the last hour.

import { bytes, clock, count, micros, percent, rate } from './format.js';

const HEIGHT = 160;
const WINDOW = 60_000; // ms over which a hit rate is taken

const powersOf2 = Array.from({ length: 50 }, (_, i) => 2 ** i); // between ticks of bytes
const wholes = Array.from({ length: 20 }, (_, i) => 10 ** i).flatMap((n) => [n, 2 * n, 5 * n]);
const colours = ['--a', '--b', '--c', '--d', '--e', '--f'];

// A figure of the charts takes all points and the number of one. It returns null where it is not
// known.

const now = (get) => (points, i) => get(points[i]);

// perSecond returns the rate at which a count grew since the point before.
export const perSecond = (get) => (points, i) => {
  if (i < 1) return null;
  const grown = get(points[i]) - get(points[i - 1]);
  return grown < 0 ? null : (1000 * grown) / (points[i].at - points[i - 1].at);
};

// share returns what of all that was counted in the last minute was of the one kind.
export const share = (of, all) => (points, i) => {
  let from = i;
  while (from > 0 && points[i].at - points[from].at < WINDOW) from--;
  const counted = all(points[i]) - all(points[from]);
  return counted > 0 ? (of(points[i]) - of(points[from])) / counted : null;
};

export const found = share((p) => p.tokens_found, (p) => p.tokens_asked);
export const hit = share((p) => p.blocks_hit, (p) => p.blocks);
export const hitUnlimited = share((p) => p.blocks_unlimited, (p) => p.blocks);
export const loaded = perSecond((p) => p.loaded);
export const saved = perSecond((p) => p.saved);

const tierLines = (tiers) => tiers.flatMap((name, i) => [
  [`${name} read`, perSecond((p) => p.tiers[i][0])], [`${name} written`, perSecond((p) => p.tiers[i][1])],
]);

// Each chart has lines, [name, figure], which may depend on the names of the tiers.
const charts = [
  {
    title: 'Hit rate, of the last minute', text: percent, range: [0, 1],
    lines: () => [
      ['tokens', found], ['blocks', hit], ['blocks, unlimited pool', hitUnlimited],
    ],
  },
  {
    title: 'Bytes of engines', text: rate, ticks: powersOf2, lines: () => [['loaded', loaded], ['saved', saved]],
  },
  { title: 'Bytes of tiers', text: rate, ticks: powersOf2, lines: tierLines },
  {
    title: 'Slowest look-up, in kvagent’s own form', text: micros,
    lines: () => [['slowest', now((p) => p.slowest_us)]],
  },
  {
    title: 'Pool', text: bytes, ticks: powersOf2,
    lines: () => [['used', now((p) => p.used)], ['pinned', now((p) => p.pinned)], ['capacity', now((p) => p.capacity)]],
  },
  {
    title: 'Engines', text: count, ticks: wholes,
    lines: () => [['all', now((p) => p.engines)], ['complete', now((p) => p.complete)]],
  },
];

export class Charts {
  constructor(place) {
    this.place = place;
    this.points = [];
    this.plots = charts.map((chart) => {
      const box = document.createElement('div');
      const title = document.createElement('h2');
      box.className = 'chart';
      title.textContent = chart.title;
      box.append(title);
      place.append(box);
      return { chart, box, plot: null };
    });
    this.build([]);
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => this.build(this.tiers));
    new ResizeObserver(() => this.resize()).observe(place);
  }

  // build makes the plots anew, in the colours of the style sheet.
  build(tiers) {
    this.tiers = tiers;
    const style = getComputedStyle(document.documentElement);
    const font = `12px ${getComputedStyle(document.body).fontFamily}`;
    const colour = (name) => style.getPropertyValue(name).trim();
    for (const p of this.plots) {
      p.plot?.destroy();
      p.lines = p.chart.lines(tiers);
      p.box.hidden = p.lines.length === 0;
      const axis = { font, stroke: colour('--faint'), grid: { stroke: colour('--line'), width: 1 }, ticks: { show: false } };
      p.plot = new uPlot({
        width: this.width(p), height: HEIGHT, cursor: { sync: { key: 'kvagent' } },
        scales: { y: { range: (u, low, high) => p.chart.range ?? [0, high > 0 ? high * 1.1 : 1] } },
        axes: [
          { ...axis, space: 80, size: 30, values: (u, ticks) => ticks.map((t) => clock(1000 * t)) },
          { ...axis, size: 76, incrs: p.chart.ticks, values: (u, ticks) => ticks.map((t) => p.chart.text(t)) },
        ],
        series: [
          { label: 'time', value: (u, t) => (t == null ? '–' : clock(1000 * t)) },
          ...p.lines.map(([label], i) => ({
            label, stroke: colour(colours[i % colours.length]), width: 1.5, points: { show: false },
            value: (u, v) => p.chart.text(v),
          })),
        ],
      }, this.data(p), p.box);
    }
  }

  width(p) { return Math.max(200, p.box.clientWidth - 16); }

  resize() {
    for (const p of this.plots) {
      if (p.plot.width !== this.width(p)) p.plot.setSize({ width: this.width(p), height: HEIGHT });
    }
  }

  data(p) {
    return [this.points.map((one) => one.at / 1000),
      ...p.lines.map(([, figure]) => this.points.map((_, i) => figure(this.points, i)))];
  }

  // show draws the points, of an agent with these tiers.
  show(points, tiers) {
    this.points = points;
    if (tiers.join('\n') !== this.tiers.join('\n')) this.build(tiers);
    for (const p of this.plots) p.plot.setData(this.data(p));
    this.place.dataset.points = points.length;
  }
}
