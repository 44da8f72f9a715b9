package tier

import (
	"context"
	"sync"

	"github.com/kvagent/kvagent/pool"
)

// stride is how many entries are looked at in one step.
const stride = 64

// Where an entry is, besides the number of a lane.
const (
	nowhere  = -1
	inMemory = -2
)

// look is the scratch memory of one call.
type look struct {
	where   []int8 // of the entries from the first that memory lacks
	present [stride]bool
	keys    []pool.Key
	status  [2 * stride]pool.Status
	absent  [stride]int16
}

var looks = sync.Pool{New: func() any { return &look{keys: make([]pool.Key, 0, 2*stride)} }}

// Prefix implements pool.Index: memory's prefix, and behind it what memory or a tier is known to have.
func (p *Pool) Prefix(s pool.SpaceID, group uint8, h pool.Hashes) int {
	n := p.memory.Prefix(s, group, h)
	if p.using && n > 0 {
		p.uses.add(s, group, h.Slice(0, n))
	}
	if n == h.N || len(p.lanes) == 0 {
		return n
	}
	w := looks.Get().(*look)
	defer looks.Put(w)
	end := p.walk(w, s, group, &h, n)
	for i := n; i < end; i++ { // what is in memory behind a gap is used too
		if w.where[i-n] != inMemory {
			continue
		}
		to := runEnd(w.where, i-n, end-n) + n
		p.memory.Prefix(s, group, h.Slice(i, to))
		i = to
	}
	return end
}

// runEnd is the end of the run in memory that begins at i.
func runEnd(where []int8, i, end int) int {
	for i < end && where[i] == inMemory {
		i++
	}
	return i
}

// Exists implements pool.Index.
func (p *Pool) Exists(s pool.SpaceID, group uint8, h pool.Hashes, present []bool) {
	p.memory.Exists(s, group, h, present)
	sp := p.spaces.get(s)
	g := sp.group(group)
	if len(p.lanes) == 0 || g == nil {
		return
	}
	w := looks.Get().(*look)
	defer looks.Put(w)
	now := sp.now.Load()
	for from := 0; from < h.N; from += stride {
		to := min(from+stride, h.N)
		w.where = append(w.where[:0], make([]int8, to-from)...)
		for i := range w.where {
			w.where[i] = nowhere
			if present[from+i] {
				w.where[i] = inMemory
			}
		}
		p.below(w, sp, now, g, group, &h, from, w.where)
		for i := range w.where {
			present[from+i] = w.where[i] != nowhere
		}
	}
}

// walk says where the entries from n on are, as far as they are known to be anywhere and worth their loading, and gives the end of them.
func (p *Pool) walk(w *look, s pool.SpaceID, group uint8, h *pool.Hashes, n int) (end int) {
	w.where = w.where[:0]
	sp := p.spaces.get(s)
	g := sp.group(group)
	if g == nil {
		return n
	}
	now := sp.now.Load()
	step := 1 // most chains end here
	for from := n; from < h.N; {
		to := min(from+step, h.N)
		w.where = append(w.where, w.present2(to-from)...)
		part := w.where[from-n:]
		p.inMemory(w, s, group, h, from, part)
		p.below(w, sp, now, g, group, h, from, part)
		for i := range part {
			if part[i] == nowhere {
				return p.worth(w.where[:from+i-n], sp, g, n, from+i)
			}
		}
		from, step = to, stride
	}
	return p.worth(w.where, sp, g, n, h.N)
}

var noneThere = func() (all [stride]int8) {
	for i := range all {
		all[i] = nowhere
	}
	return all
}()

// present2 is n entries that are nowhere.
func (w *look) present2(n int) []int8 { return noneThere[:n] }

// inMemory marks what memory has of the entries from from on.
func (p *Pool) inMemory(w *look, s pool.SpaceID, group uint8, h *pool.Hashes, from int, where []int8) {
	present := w.present[:len(where)]
	p.memory.Exists(s, group, h.Slice(from, from+len(where)), present)
	for i, there := range present {
		if there {
			where[i] = inMemory
		}
	}
}

// below marks what tiers are known to have of the entries that are nowhere yet, at most stride of them.
func (p *Pool) below(w *look, sp *space, now *life, g *group, group uint8, h *pool.Hashes, from int, where []int8) {
	if now.epoch == 0 || now.off {
		return
	}
	for _, l := range p.lanes {
		if !l.up() || p.slow(l, sp, g) {
			continue
		}
		if l.Local {
			l.exact(w, sp, now, group, h, from, where)
			continue
		}
		clock := p.now()
		for i := range where {
			if where[i] != nowhere {
				continue
			}
			if there, _ := l.known.get(now.print(group, h.At(from+i)), clock); there {
				where[i] = int8(l.number)
			}
		}
	}
}

// exact asks a local store.
func (l *lane) exact(w *look, sp *space, now *life, group uint8, h *pool.Hashes, from int, where []int8) {
	w.keys = w.keys[:0]
	n, per := 0, min(sp.spec.Shards, 2)
	for i := range where {
		if where[i] != nowhere {
			continue
		}
		k := entryKey{group: group, hash: pool.MakeHash(h.At(from + i))}
		w.keys = now.witnesses(&k, sp.spec.Shards, w.keys)
		w.absent[n] = int16(i)
		n++
	}
	if n == 0 {
		return
	}
	status := w.status[:len(w.keys)]
	for i := range status {
		status[i] = pool.Missing
	}
	if err := l.Store.Exists(context.Background(), w.keys, status); err != nil {
		l.result(context.Background(), err)
		return
	}
	for i := range n {
		if has(status[i*per : (i+1)*per]) {
			where[w.absent[i]] = int8(l.number)
		}
	}
}
