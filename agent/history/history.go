// Package history remembers the last look-ups, refused saves, resets, and blocks that left memory,
// and explains from them why a prompt was not found.
package history

import (
	"encoding/binary"
	"sync"
	"time"
	"unsafe"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

// Limits of what is remembered. Beyond one, the oldest is forgotten.
const (
	MaxLookups = 4096    // look-ups
	HashBytes  = 8 << 20 // bytes of their hashes, all together
	MaxHashes  = 8 << 10 // hashes of one look-up; the rest of it is not explained
	MaxRefused = 1 << 14 // blocks of refused saves
	MaxResets  = 256
	MaxLeft    = 1 << 16 // blocks that left memory; as many again that resets dropped

	// Bytes is the memory that all of it takes, but for the texts of resets.
	Bytes = MaxLookups*int64(unsafe.Sizeof(Lookup{})) + HashBytes + MaxRefused*int64(unsafe.Sizeof(refusal{})) +
		MaxResets*int64(unsafe.Sizeof(Reset{})) + 2*MaxLeft*int64(unsafe.Sizeof(departure{}))
)

// recentLookups is the number of look-ups among which a repeated one is searched.
const recentLookups = 16

// Lookup is a look-up that was answered. It has no pointers.
type Lookup struct {
	At      int64 // Unix ns of the last answer
	Space   pool.Fingerprint
	Session uint64
	Tokens  uint32 // of the prompt
	Own     uint32 // that the engine had itself
	Found   uint32 // as answered
	Blocks  uint32 // hashes
	Skipped uint32 // of those, the first ones, which the engine had or that were found
	Kept    uint32 // of the others, the first ones
	Times   uint32 // that it was asked: probes, and repeats of pending ones
	Form    ipc.Form
	Want    ipc.LookupWant
	Status  ipc.LookupStatus
	HashLen uint8
	Groups  uint16 // that were asked for, a bit each; 0: all
	Late    bool   // some tier had not answered in time
	Last    uint64 // the end of the last hash, by which it is named

	from uint64 // of its hashes, in bytes that were ever kept
}

// refusal is a block of a save that was not stored.
type refusal struct {
	at     int64
	block  uint64 // pool.Mark
	space  uint64 // spaceMark
	group  uint8
	status pool.Status
}

// Reset is a reset of a space.
type Reset struct {
	At    time.Time
	Space pool.Fingerprint
	By    string // for people
}

// History is what is remembered. A nil History remembers nothing.
type History struct {
	since time.Time

	mu      sync.Mutex // a leaf: held for the copy of one look-up's hashes at most
	lookups []Lookup
	asked   uint64 // look-ups ever
	hashes  []byte // a ring
	kept    uint64 // bytes ever
	refused []refusal
	refuses uint64 // ever
	resets  []Reset

	recordings []*Recording
	departures departures
}

// departure is a block that left memory.
type departure struct {
	at    int64
	block uint64 // pool.Mark
	space uint64 // spaceMark
	class string // of the eviction policy, one of its few names; empty: none
	group uint8
	cause pool.Cause
}

// departures are the last blocks that left memory. What resets dropped has a ring of its own: a
// reset must not make the evictions before it forgotten.
type departures struct {
	mu    sync.Mutex // a leaf, taken under the pool's lock
	rings [2][]departure
	made  [2]uint64 // ever
}

// New makes an empty history. Its memory is touched as it fills.
func New() *History {
	h := &History{
		since: time.Now(), lookups: make([]Lookup, MaxLookups), hashes: make([]byte, HashBytes),
		refused: make([]refusal, MaxRefused),
	}
	for i := range h.departures.rings {
		h.departures.rings[i] = make([]departure, MaxLeft)
	}
	return h
}

// spaceMark stands for a space in records.
func spaceMark(fp pool.Fingerprint) uint64 { return binary.BigEndian.Uint64(fp[:]) }

// Left remembers a block that left memory.
func (h *History) Left(d *pool.Departure) {
	one := departure{
		at: time.Now().UnixNano(), block: d.Block, space: spaceMark(d.Space), group: d.Group, cause: d.Cause,
		class: d.Class,
	}
	ring := 0
	if d.Cause == pool.ByReset {
		ring = 1
	}
	all := &h.departures
	all.mu.Lock()
	defer all.mu.Unlock()
	all.rings[ring][all.made[ring]%MaxLeft] = one
	all.made[ring]++
}

// each calls found for all departures, the oldest of each ring first, without the lock. One that is
// overwritten meanwhile is left out.
func (a *departures) each(found func(d *departure)) {
	var part [256]departure
	for i := range a.rings {
		for from := uint64(0); ; {
			a.mu.Lock()
			from = max(from, a.made[i]-min(a.made[i], MaxLeft))
			n := 0
			for ; from < a.made[i] && n < len(part); from, n = from+1, n+1 {
				part[n] = a.rings[i][from%MaxLeft]
			}
			a.mu.Unlock()
			for j := range n {
				found(&part[j])
			}
			if n < len(part) {
				break
			}
		}
	}
}

// Since returns when the history began.
func (h *History) Since() time.Time { return h.since }

// Answered remembers a look-up of a space, of whose tokens each hash has hashTokens (0: unknown).
// It is called after the answer was sent, and keeps nothing of req.
func (h *History) Answered(fp pool.Fingerprint, hashTokens uint32, req *ipc.LookupRequest, reply *ipc.LookupReply) {
	if h == nil || req.HashLen == 0 || len(req.Hashes) < req.HashLen {
		return
	}
	n := len(req.Hashes) / req.HashLen
	l := Lookup{
		At: time.Now().UnixNano(), Space: fp, Session: req.Session, Tokens: uint32(min(req.Tokens, 1<<32-1)),
		Own: req.HBMTokens, Found: reply.Tokens, Blocks: uint32(n), Times: 1, Form: req.Form, Want: req.Want,
		Status: reply.Status, HashLen: uint8(req.HashLen), Late: reply.Late,
		Last: endOf(req.Hashes[(n-1)*req.HashLen : n*req.HashLen]),
	}
	if hashTokens > 0 {
		l.Skipped = min(uint32(n), max(l.Own, l.Found)/hashTokens)
	}
	for _, g := range req.Groups {
		l.Groups |= 1 << (g % pool.MaxGroups)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	old := h.repeatedLocked(&l)
	h.recordLocked(&l, old, hashTokens, req)
	if old != nil && old.Skipped <= l.Skipped && l.Skipped <= old.Skipped+old.Kept {
		more := l.Skipped - old.Skipped
		l.from, l.Kept = old.from+uint64(more)*uint64(l.HashLen), old.Kept-more
	} else {
		l.Kept = min(l.Blocks-l.Skipped, MaxHashes)
		l.from = h.keepLocked(req.Hashes[int(l.Skipped)*req.HashLen:][:int(l.Kept)*req.HashLen])
	}
	if old != nil {
		l.Times = old.Times + 1
		*old = l
		return
	}
	h.lookups[h.asked%MaxLookups] = l
	h.asked++
}

// endOf returns the last 8 bytes of a hash.
func endOf(hash []byte) uint64 {
	var end [8]byte
	copy(end[max(0, len(end)-len(hash)):], hash[max(0, len(hash)-len(end)):])
	return binary.BigEndian.Uint64(end[:])
}

// repeatedLocked returns the recent look-up that this one repeats: a probe, or one whose answer was
// pending.
func (h *History) repeatedLocked(l *Lookup) *Lookup {
	for i := h.asked; i > 0 && i+recentLookups > h.asked; i-- {
		old := &h.lookups[(i-1)%MaxLookups]
		if old.Last == l.Last && old.Space == l.Space && old.Blocks == l.Blocks && old.Session == l.Session {
			if (old.isProbe() || old.Status == ipc.LookupPending) && h.kept-old.from <= HashBytes {
				return old
			}
			return nil
		}
	}
	return nil
}

// keepLocked copies hashes into the ring, and returns where they begin.
func (h *History) keepLocked(hashes []byte) (from uint64) {
	from = h.kept
	at := int(from % HashBytes)
	n := copy(h.hashes[at:], hashes)
	copy(h.hashes, hashes[n:])
	h.kept += uint64(len(hashes))
	return from
}

// Refused remembers the blocks of a save that were not stored: those whose status is neither OK nor
// that they are stored, or being stored, anyway.
func (h *History) Refused(fp pool.Fingerprint, group uint8, hashes pool.Hashes, status []pool.Status) {
	if h == nil {
		return
	}
	r := refusal{space: spaceMark(fp), group: group}
	for i, s := range status[:hashes.N] {
		if s == pool.OK || s == pool.Exists || s == pool.InProgress {
			continue
		}
		if r.at == 0 {
			r.at = time.Now().UnixNano()
			h.mu.Lock()
			defer h.mu.Unlock()
		}
		r.block, r.status = pool.Mark(hashes.At(i)), s
		h.refused[h.refuses%MaxRefused] = r
		h.refuses++
	}
}

// WasReset remembers a reset.
func (h *History) WasReset(r Reset) {
	if h == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.resets) == MaxResets {
		h.resets = append(h.resets[:0], h.resets[1:]...)
	}
	h.resets = append(h.resets, r)
}

// Last returns the last n look-ups, the latest first.
func (h *History) Last(n int) []Lookup {
	if h == nil {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	var out []Lookup
	for i := h.asked; i > 0 && len(out) < n && i+MaxLookups > h.asked; i-- {
		out = append(out, h.lookups[(i-1)%MaxLookups])
	}
	return out
}

// hashesOf copies the hashes of a look-up that were not skipped; ok is false if they were
// overwritten.
func (h *History) hashesOf(l *Lookup) (hashes pool.Hashes, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.kept-l.from > HashBytes {
		return hashes, false
	}
	blob := make([]byte, int(l.Kept)*int(l.HashLen))
	n := copy(blob, h.hashes[l.from%HashBytes:])
	copy(blob[n:], h.hashes)
	return pool.Chain(blob, int(l.HashLen)), true
}

// refusals returns the refusals of blocks of a space that are wanted, by time.
func (h *History) refusals(space uint64, wanted map[blockMark]bool) map[blockMark][]refusal {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := map[blockMark][]refusal{}
	for i := h.refuses - min(h.refuses, MaxRefused); i < h.refuses; i++ {
		r := &h.refused[i%MaxRefused]
		if mark := (blockMark{r.block, r.group}); r.space == space && wanted[mark] {
			out[mark] = append(out[mark], *r)
		}
	}
	return out
}

// resetBefore returns the last reset of a space until a time, Unix ns.
func (h *History) resetBefore(fp pool.Fingerprint, at int64) (r Reset, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := range h.resets {
		if one := &h.resets[i]; one.Space == fp && one.At.UnixNano() <= at {
			r, ok = *one, true
		}
	}
	return r, ok
}
