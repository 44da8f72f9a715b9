// Numbers as people read them. Each function takes null as "not known".

const none = '–';
const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];

export function bytes(n) {
  if (n == null) return none;
  let i = 0;
  while (n >= 1024 && i < units.length - 1) { n /= 1024; i++; }
  return i === 0 ? `${Math.round(n)} B` : `${n.toFixed(1)} ${units[i]}`;
}

export const rate = (n) => (n == null ? none : n === 0 ? '0' : `${bytes(n)}/s`);

export function count(n) {
  if (n == null) return none;
  if (Number.isInteger(n) && n < 10000) return String(n);
  if (n < 9.95) return n.toFixed(1);
  if (n < 9999.5) return n.toFixed(0);
  if (n < 999500) return `${(n / 1e3).toFixed(0)}k`;
  return n < 9.995e8 ? `${(n / 1e6).toFixed(0)}M` : `${(n / 1e9).toFixed(0)}G`;
}

export const percent = (share) => (share == null ? none : `${(100 * share).toFixed(1)} %`);

export function micros(us) {
  if (us == null) return none;
  return us < 1000 ? `${us.toFixed(0)} µs` : us < 1e6 ? `${(us / 1e3).toFixed(1)} ms` : `${(us / 1e6).toFixed(2)} s`;
}

export function duration(s) {
  const part = (n, one, other) => `${Math.floor(s / n)}${one} ${String(Math.floor((s % n) / other)).padStart(2, '0')}`;
  if (s >= 86400) return `${part(86400, 'd', 3600)}h`;
  if (s >= 3600) return `${part(3600, 'h', 60)}m`;
  return s >= 60 ? `${part(60, 'm', 1)}s` : `${Math.floor(s)}s`;
}

export const clock = (ms) => new Date(ms).toLocaleTimeString([], { hour12: false });
