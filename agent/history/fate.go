package history

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/kvagent/kvagent/agent/report"
	"github.com/kvagent/kvagent/pool"
)

// Fates of blocks.
const (
	Own        = "own"         // the engine had it itself
	Found      = "found"       // by the look-up
	Stored     = "stored"      // in memory now
	InTier     = "in_tier"     // below memory, and not in memory
	Evicted    = "evicted"     // from memory, to make room
	OverBudget = "over_budget" // evicted to keep its engine's budget
	Incomplete = "incomplete"  // some ranks never stored their part
	WasReset   = "reset"       // its space was reset
	Expired    = "expired"     // its request gave it a time to live
	Corrupt    = "corrupt"     // its bytes did not verify
	BadPage    = "bad_page"    // its memory cannot be read
	NotSaved   = "not_saved"   // a save of it was refused
	OtherSpace = "other_space" // another space has it
	NotStored  = "not_stored"  // never, as far as the agent remembers
)

var fateOf = map[pool.Cause]string{
	pool.ByEviction: Evicted, pool.ByBudget: OverBudget, pool.ByAge: Incomplete, pool.ByReset: WasReset,
	pool.ByTime: Expired, pool.ByCorruption: Corrupt, pool.ByBadPage: BadPage,
}

// Fate is what became of a run of blocks of one group.
type Fate struct {
	Group uint8  `json:"group"`
	From  int    `json:"from"`            // number of the first block of the group
	To    int    `json:"to"`              // of the last one
	First string `json:"first,omitempty"` // hash, hex; none if the engine had the blocks or they were found
	Last  string `json:"last,omitempty"`
	Fate  string `json:"fate"`

	At    *time.Time `json:"at,omitempty"`    // when the first of them left, or was refused
	Class string     `json:"class,omitempty"` // of the eviction policy
	By    string     `json:"by,omitempty"`    // who reset the space
	Why   string     `json:"why,omitempty"`   // a save was refused: the status of the block

	Since bool `json:"stored_since,omitempty"` // stored now

	Space       string       `json:"space,omitempty"` // that has it, hex
	Differences []Difference `json:"differences,omitempty"`
}

// same reports whether the next block belongs to the run.
func (f *Fate) same(next *Fate) bool {
	return f.Group == next.Group && f.To+1 == next.From && f.Fate == next.Fate && f.Class == next.Class &&
		f.Why == next.Why && f.Space == next.Space && f.By == next.By && f.Since == next.Since
}

// join adds the next block to the run.
func (f *Fate) join(next *Fate) {
	f.To, f.Last = next.To, next.Last
	if next.At != nil && next.At.Before(*f.At) {
		f.At = next.At
	}
}

// Difference is a field of two identities that differs.
type Difference struct {
	Field string `json:"field"`
	Asked string `json:"asked"` // in the space that was asked for
	Has   string `json:"has"`   // in the space that has the block
}

// blockMark stands for a block of a space.
type blockMark struct {
	block uint64
	group uint8
}

// trial finds what became of blocks of a space.
type trial struct {
	world  *World
	space  *report.Space
	spaces []report.Space // where else a block may be

	gone      map[blockMark][]departure   // of the space
	elsewhere map[blockMark]*report.Space // spaces that have, or had, the block
	refused   map[blockMark][]refusal
}

// chain is the blocks of a group from number first on: the engine had those before, or they were
// found.
type chain struct {
	group  uint8
	first  int
	hashes pool.Hashes
}

// newTrial collects what is remembered of the chains.
func newTrial(w *World, space *report.Space, spaces []report.Space, chains []chain) *trial {
	t := &trial{
		world: w, space: space, spaces: spaces, gone: map[blockMark][]departure{},
		elsewhere: map[blockMark]*report.Space{},
	}
	wanted := map[blockMark]bool{}
	for _, c := range chains {
		for i := range c.hashes.N {
			wanted[blockMark{pool.Mark(c.hashes.At(i)), c.group}] = true
		}
	}
	here := spaceMark(space.Fingerprint)
	t.refused = w.History.refusals(here, wanted)
	byMark := map[uint64]*report.Space{}
	for i := range spaces {
		byMark[spaceMark(spaces[i].Fingerprint)] = &spaces[i]
	}
	w.History.departures.each(func(d *departure) {
		mark := blockMark{d.block, d.group}
		switch {
		case !wanted[mark]:
		case d.space == here:
			one := *d
			if r, ok := w.History.resetBefore(space.Fingerprint, d.at); ok && d.cause == pool.ByReset {
				one.at = r.At.UnixNano()
			}
			t.gone[mark] = append(t.gone[mark], one)
		case byMark[d.space] != nil:
			t.elsewhere[mark] = byMark[d.space]
		}
	})
	return t
}

// departure returns the last one of a block before a time. What a reset dropped left when it was
// reset.
func (t *trial) departure(mark blockMark, at int64) (d departure, ok bool) {
	for _, one := range t.gone[mark] {
		if one.at <= at && (!ok || one.at >= d.at) {
			d, ok = one, true
		}
	}
	return d, ok
}

// refusal returns the last refusal of a block before a time.
func (t *trial) refusal(mark blockMark, at int64) (r refusal, ok bool) {
	for _, one := range t.refused[mark] {
		if one.at <= at {
			r, ok = one, true
		}
	}
	return r, ok
}

// judge returns the fates of a chain, in runs: of a look-up's, what they were at its time; without
// one (nil), what they are. ask: tiers are asked, too.
func (t *trial) judge(c *chain, l *Lookup, ask bool) (runs []Fate) {
	h, at, plain := c.hashes, time.Now().UnixNano(), l == nil || l.Late || reasonOf[l.Status] != ""
	if l != nil {
		at = l.At
		own := min(int(l.Own/t.space.Descriptions[c.group].BlockTokens), c.first)
		if own > 0 {
			runs = append(runs, Fate{Group: c.group, To: own - 1, Fate: Own})
		}
		if own < c.first {
			runs = append(runs, Fate{Group: c.group, From: own, To: c.first - 1, Fate: Found})
		}
	}
	memory, below := t.stored(c, ask)
	has := t.inOthers(c)
	for i := range h.N {
		f := Fate{Group: c.group, From: c.first + i, To: c.first + i, First: fmt.Sprintf("%x", h.At(i))}
		f.Last = f.First
		switch {
		// What a look-up did not find was not there, and mostly neither was what follows it: a
		// suffix is evicted before its prefix. Only one block that was lost leaves its followers.
		case !(memory[i] || below[i]) || !plain:
			f.Since = memory[i] || below[i]
			t.remembered(&f, blockMark{pool.Mark(h.At(i)), c.group}, at, has[i])
			plain = plain || f.Fate == Corrupt || f.Fate == BadPage
		case memory[i]:
			f.Fate = Stored
		default:
			f.Fate = InTier
		}
		if n := len(runs); n > 0 && runs[n-1].same(&f) {
			runs[n-1].join(&f)
		} else {
			runs = append(runs, f)
		}
	}
	return runs
}

// stored returns which blocks of a chain are in memory now, and which in a tier.
func (t *trial) stored(c *chain, ask bool) (memory, below []bool) {
	memory, below = make([]bool, c.hashes.N), make([]bool, c.hashes.N)
	w, sp := t.world, t.space
	if !sp.Open {
		return memory, below
	}
	if ask && w.Ask != nil {
		w.Ask(sp.ID, c.group, c.hashes, time.Now().Add(askTiers))
	}
	w.Index.Exists(sp.ID, c.group, c.hashes, below)
	if !w.Memory.Holds(sp.ID, c.group, c.hashes, memory) {
		return below, memory
	}
	return memory, below
}

// remembered sets the fate that a block had at a time (Unix ns), when it was not stored. has is a
// space that has it; nil: none.
func (t *trial) remembered(f *Fate, mark blockMark, at int64, has *report.Space) {
	d, left := t.departure(mark, at)
	r, refused := t.refusal(mark, at)
	if has == nil {
		has = t.elsewhere[mark]
	}
	switch {
	case left && (!refused || d.at > r.at):
		f.Fate, f.Class = fateOf[d.cause], d.class
		f.setTime(d.at)
		if d.cause == pool.ByReset {
			one, _ := t.world.History.resetBefore(t.space.Fingerprint, d.at)
			f.By = one.By
		}
	case refused:
		f.Fate, f.Why = NotSaved, report.StatusNames[r.status]
		f.setTime(r.at)
	case has != nil:
		f.Fate, f.Space = OtherSpace, fmt.Sprintf("%x", has.Fingerprint)
		f.Differences = differences(t.space, has)
	default:
		f.Fate = NotStored
	}
}

func (f *Fate) setTime(ns int64) {
	at := time.Unix(0, ns).UTC()
	f.At = &at
}

// inOthers returns for each block another space that has it now, the one with the fewest
// differences.
func (t *trial) inOthers(c *chain) []*report.Space {
	has := make([]*report.Space, c.hashes.N)
	fewest := make([]int, c.hashes.N)
	present := make([]bool, c.hashes.N)
	for i := range t.spaces {
		o := &t.spaces[i]
		if o.Fingerprint == t.space.Fingerprint || !o.Open || int(c.group) >= len(o.Descriptions) {
			continue
		}
		t.world.Index.Exists(o.ID, c.group, c.hashes, present)
		n := len(differences(t.space, o))
		for b := range present {
			if present[b] && (has[b] == nil || n < fewest[b]) {
				has[b], fewest[b] = o, n
			}
		}
	}
	return has
}

// Fields of a space's fingerprint that are no pairs of its identity.
const (
	hashTokensField = "hash_tokens"
	groupsField     = "groups"
)

// differences returns the fields in which two spaces differ, by name.
func differences(asked, has *report.Space) (out []Difference) {
	fields := map[string]bool{}
	for f := range asked.Identity {
		fields[f] = true
	}
	for f := range has.Identity {
		fields[f] = true
	}
	for _, f := range slices.Sorted(maps.Keys(fields)) {
		if asked.Identity[f] != has.Identity[f] {
			out = append(out, Difference{f, asked.Identity[f], has.Identity[f]})
		}
	}
	if asked.HashTokens != has.HashTokens {
		out = append(out, Difference{hashTokensField, fmt.Sprint(asked.HashTokens), fmt.Sprint(has.HashTokens)})
	}
	if !slices.Equal(asked.Descriptions, has.Descriptions) {
		out = append(out, Difference{groupsField, fmt.Sprint(asked.Descriptions), fmt.Sprint(has.Descriptions)})
	}
	return out
}
