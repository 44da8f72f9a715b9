// The page shows the frames of its stream: the points of the last hour, and the latest status.

import { Charts, found, hit, hitUnlimited, loaded, perSecond, saved } from './charts.js';
import { bytes, clock, count, duration, micros, percent, rate } from './format.js';
import { Table } from './tables.js';

const MAX = 1800; // points: an hour
const AGAIN = 5000; // ms until a stream that was refused is asked for again
const SILENCE = 10_000; // ms without a frame after which the agent counts as not answering

const at = (id) => document.getElementById(id);
const state = at('state');

function say(text, alarm) {
  if (state.textContent !== text) state.textContent = text;
  if (state.dataset.alarm !== alarm) state.dataset.alarm = alarm;
}

// ---- tiles: a name, a number, and what belongs to it. Each takes the status, and a function that
// returns the latest value of a chart's figure.

const shareOf = (of, all) => (all > 0 ? of / all : null);

const tiles = [
  ['Tokens found', (s, now) => percent(now(found)), (s) => `${percent(shareOf(s.tokens_found, s.tokens_asked))} since the start`],
  ['Blocks hit', (s, now) => percent(now(hit)), (s, now) => `unlimited pool ${percent(now(hitUnlimited))}`],
  ['Look-ups', (s, now) => `${count(now(perSecond((p) => p.lookups)))}/s`, (s) => `slowest since the start ${micros(s.lookup_max_us || null)}`],
  ['Loads', (s, now) => rate(now(loaded)), (s) => `${count(s.jobs)} jobs, ${count(s.leases)} leases`],
  ['Saves', (s, now) => rate(now(saved)), (s) => `${bytes(s.bytes_saved)} since the start`],
  ['Pool', (s) => percent(shareOf(s.pool.used_bytes, s.pool.capacity_bytes)),
    (s) => `${bytes(s.pool.used_bytes)} of ${bytes(s.pool.capacity_bytes)}`],
].map(([name, number, more]) => {
  const tile = document.createElement('div');
  const [a, b, c] = ['span', 'b', 'small'].map((kind) => tile.appendChild(document.createElement(kind)));
  tile.className = 'tile';
  a.textContent = name;
  b.textContent = '–';
  at('tiles').append(tile);
  return (s, now) => {
    b.textContent = number(s, now);
    c.textContent = more(s, now);
    c.title = c.textContent;
  };
});

// ---- tables

const text = (name, get, more = {}) => ({ name, text: (r) => String(get(r) ?? ''), ...more });
const value = (name, get, format = count, more = {}) => ({
  name, value: get, text: (r) => format(get(r)), number: true, ...more,
});

const reasons = new Table(at('reasons'), [
  text('Reason', (r) => r.reason), value('Tokens', (r) => r.tokens, count, { share: true }),
  value('Look-ups', (r) => r.lookups),
], { sort: 1, up: false, none: 'nothing was asked for and not found' });

const lookups = new Table(at('lookups'), [
  { name: 'Time', value: (l) => Date.parse(l.at), text: (l) => clock(l.at) },
  text('ID', (l) => l.id), text('Model', (l) => l.model), text('Status', (l) => l.status),
  value('Tokens', (l) => l.tokens), value('Engine has', (l) => l.tokens_own), value('Found', (l) => l.tokens_found),
], { up: false, none: 'no look-up yet' });

const engines = new Table(at('engines'), [
  text('Engine', (e) => e.instance), text('Model', (e) => e.model), text('Ranks', (e) => e.ranks),
  value('Saves', (e) => e.saves), value('Loads', (e) => e.loads), value('Unsent', (e) => e.unsent),
  value('Leased', (e) => e.lease_bytes, bytes, { share: true }), text('State', (e) => e.state),
], { none: 'no engine is connected' });

const tiers = new Table(at('tiers'), [
  text('Tier', (t) => t.name), text('State', (t) => t.state), value('Used', (t) => t.usage.bytes, bytes),
  value('Of', (t) => t.usage.capacity_bytes || null, bytes), value('Blocks read', (t) => t.hits),
  value('Missed', (t) => t.misses), value('Written', (t) => t.puts_stored), value('Fetching', (t) => t.queue_fetch),
  value('Writing', (t) => t.queue_put), value('Failed', (t) => t.failed),
], { none: 'no tier below memory' });

const movers = new Table(at('movers'), [
  text('Mover', (m) => m.name), text('Device', (m) => m.device),
  value('Process', (m) => m.pid || null, (n) => (n == null ? 'none' : String(n))),
  value('Up', (m) => (m.running ? m.up_seconds : null), (s) => (s == null ? '–' : duration(s))),
  value('Workers', (m) => m.peers), value('Copies', (m) => m.copies),
  value('Lost', (m) => m.losses), text('Last loss', (m) => m.last_loss, { wide: true }),
], { none: 'no movers: engines’ memory is open in the agent' });

at('filter').addEventListener('input', (e) => engines.narrow(e.target.value));

const sum = (list, get) => list.reduce((n, one) => n + get(one), 0);

function engineRow(e) {
  const busy = e.sessions.filter((s) => s.step !== 'idle').sort((a, b) => b.step_ms - a.step_ms)[0];
  const slow = busy && busy.step_ms >= 1000;
  return {
    ...e, ranks: `${e.sessions.filter((s) => s.registered && s.role === 'worker').length}/${e.world}`,
    saves: sum(e.sessions, (s) => s.save_queue), loads: sum(e.sessions, (s) => s.load_queue),
    unsent: sum(e.sessions, (s) => s.outbox),
    state: !e.complete ? 'incomplete' : slow ? `${busy.step} for ${micros(busy.step_ms * 1000)}` : busy?.step ?? 'idle',
    alarm: !e.complete ? 'odd' : slow ? 'bad' : '',
  };
}

function tierRow(t) {
  const odd = t.store.state && t.store.state !== 'ok';
  return {
    ...t, failed: t.puts_dropped + t.puts_failed + t.corrupt + t.timeouts + t.errors,
    state: t.error ? `${t.state}: ${t.error}` : odd ? `${t.state}, ${t.store.state} ${t.store.reason ?? ''}` : t.state,
    alarm: t.error ? 'bad' : odd ? 'odd' : '',
  };
}

const moverRow = (m) => ({
  ...m, losses: sum(Object.values(m.lost), (n) => n), alarm: m.failing ? 'bad' : !m.running && m.peers ? 'odd' : '',
});

// ---- frames

const charts = new Charts(at('charts'));
let points = [];
let latest = null; // the frame that is to be drawn
let last = 0; // when the last frame came

// take takes a frame in. However many come before the browser draws, one is drawn.
function take(frame) {
  last = Date.now();
  points = points.concat(frame.points).slice(-MAX);
  if (latest === null) requestAnimationFrame(draw);
  latest = frame;
}

function draw() {
  const { status: s, reasons: why, lookups: asked } = latest;
  latest = null;
  const now = (figure) => figure(points, points.length - 1);
  at('agent').textContent = `${s.version}, process ${s.pid}, up ${duration(s.uptime_seconds)}`;
  const off = ['loads', 'saves'].filter((one) => !s.switches[one]);
  if (s.problem) say(s.problem, 'bad');
  else if (off.length) say(`ready, ${off.join(' and ')} off`, 'odd');
  else say('ready', 'fine');
  const below = s.tiers?.list ?? [];
  charts.show(points, below.map((t) => t.name));
  for (const tile of tiles) tile(s, now);
  at('since').textContent = why ? `since ${clock(why.since)}, by the first block that each look-up lacked` : '';
  reasons.show(why?.reasons ?? []);
  at('asked').hidden = !asked;
  lookups.show(asked ?? []);
  engines.show(s.engine_list.map(engineRow));
  at('engines-count').textContent = s.engine_list.length;
  tiers.show(below.map(tierRow));
  movers.show(s.movers.map(moverRow));
}

function connect() {
  const stream = new EventSource('page/stream');
  stream.onopen = () => { points = []; }; // the first frame has all
  stream.onmessage = (e) => take(JSON.parse(e.data));
  stream.onerror = () => {
    say('the agent does not answer', 'bad');
    if (stream.readyState === EventSource.CLOSED) setTimeout(connect, AGAIN);
  };
}

setInterval(() => {
  if (last && Date.now() - last > SILENCE) say('the agent does not answer', 'bad');
}, 1000);

connect();
