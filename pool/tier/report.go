package tier

import (
	"sync/atomic"

	"github.com/kvagent/kvagent/pool"
)

// Report implements pool.Tiers.
func (p *Pool) Report() pool.TierReport {
	p.mu.Lock()
	r := pool.TierReport{
		Promises:     len(p.mu.open),
		PromiseBytes: p.mu.bytes,
		PromiseCap:   p.o.PrefetchBytes,
		Promised:     p.mu.promised,
		Fulfilled:    p.mu.installed,
		Failed:       p.mu.failed,
		Cancelled:    p.mu.dropped,
		Expired:      p.mu.expired,
		Tiers:        make([]pool.TierStatus, len(p.levels)),
	}
	now := p.now()
	for i, l := range p.levels {
		t := &r.Tiers[i]
		l.count.add(func(now *pool.TierStatus) { *t = *now })
		t.Fetching, t.Putting = l.fetches.Len(), l.puts.len()
		if now.Before(l.fullUntil) {
			t.State = "full"
		}
	}
	p.mu.Unlock()
	p.names.Report(&r)
	for i, l := range p.levels {
		l.report(&r.Tiers[i])
	}
	return r
}

func (l *level) report(t *pool.TierStatus) {
	t.Name, t.Write, t.Local, t.Usage = l.Name, l.Write.String(), l.Local, l.Store.Usage()
	if says, can := l.Store.(pool.Reporter); can {
		t.Store = says.Report()
	}
	state, opened, _, err := l.breaker.state()
	if state != "up" || t.State == "" {
		t.State = state
	}
	t.Up = t.State == "up" || t.State == "full"
	if state != "up" && err != nil {
		t.Error = err.Error()
	}
	t.Opened = opened
}

// storage is the journal of the local tiers: the entries that look-ups would find there.
type storage struct {
	p       *Pool
	levels  []*level
	changed chan struct{} // cap 1
	watched atomic.Bool
	lost    atomic.Bool
	keys    []pool.Key // the list that Changes takes next
}

// Holds implements pool.Journal for memory.
func (p *Pool) Holds(s pool.SpaceID, group uint8, h pool.Hashes, present []bool) (open bool) {
	p.Memory.Exists(s, group, h, present)
	return p.spaces.get(s) != nil
}

// Storage implements pool.Tiers.
func (p *Pool) Storage() pool.Journal {
	if p.storage == nil {
		return nil
	}
	return p.storage
}

func newStorage(p *Pool) *storage {
	j := &storage{p: p, changed: make(chan struct{}, 1)}
	for _, l := range p.levels {
		if _, notes := l.Store.(pool.KeyJournal); notes && l.Local {
			j.levels = append(j.levels, l)
		}
	}
	if len(j.levels) == 0 {
		return nil
	}
	return j
}

func (j *storage) signal() {
	select {
	case j.changed <- struct{}{}:
	default:
	}
}

// noteAll notes that any entry may have come or gone: a store began or ceased to be used, or a
// space has another name. It is called after that has happened.
func (j *storage) noteAll() {
	if j != nil && j.watched.Load() {
		j.lost.Store(true)
		j.signal()
	}
}

// Watch implements pool.Journal. It watches all spaces.
func (j *storage) Watch(pool.SpaceID) {
	if j.watched.Swap(true) {
		return
	}
	for _, l := range j.levels {
		l.Store.(pool.KeyJournal).Watch(j.signal)
	}
}

// Changed implements pool.Journal.
func (j *storage) Changed() <-chan struct{} { return j.changed }

// Changes implements pool.Journal. Only one goroutine may call it. An entry is noted once for each
// of the shards that stand for it.
func (j *storage) Changes(empty []pool.Change) (all []pool.Change, lost bool) {
	all, lost = empty[:0], j.lost.Swap(false)
	names := map[pool.Fingerprint]pool.SpaceID{}
	spaces := *j.p.spaces.all.Load()
	for id, sp := range spaces {
		if sp != nil {
			names[sp.now.Load().stored] = pool.SpaceID(id)
		}
	}
	for _, l := range j.levels {
		keys, more := l.Store.(pool.KeyJournal).Changes(j.keys)
		lost = lost || more
		for i := range keys {
			k := &keys[i]
			if id, open := names[k.Space]; open && (k.Shard == 0 || int(k.Shard) == spaces[id].spec.Shards-1) {
				all = append(all, pool.Change{Space: id, Group: k.Group, Hash: k.Hash})
			}
		}
		j.keys = keys
	}
	return all, lost
}

// Holds implements pool.Journal: it asks the stores, as a look-up does.
func (j *storage) Holds(s pool.SpaceID, group uint8, h pool.Hashes, present []bool) (open bool) {
	clear(present)
	sp := j.p.spaces.get(s)
	if sp == nil {
		return false
	}
	now := sp.now.Load()
	if sp.group(group) == nil || now.epoch == 0 || now.off {
		return true
	}
	w := scratchPool.Get().(*scratch)
	defer scratchPool.Put(w)
	for from := 0; from < h.N; from += stride {
		to := min(from+stride, h.N)
		w.where = append(w.where[:0], noneThere[:to-from]...)
		for _, l := range j.levels {
			if l.up() {
				l.markInLocal(w, sp, now, group, &h, from, w.where)
			}
		}
		for i, at := range w.where {
			present[from+i] = at != nowhere
		}
	}
	return true
}
