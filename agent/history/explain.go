package history

import (
	"cmp"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kvagent/kvagent/agent/report"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

// Limits of an explanation.
const (
	askTiers   = 600 * time.Millisecond // of the tiers, for each group: longer than a question by default
	summarized = time.Hour
)

// Reasons why a look-up found no more. If none of them is the cause, the reason is the fate of the
// first block that was missing.
const (
	Complete      = "complete" // all blocks that a hit may have were found
	LoadsOff      = "loads_off"
	NotRegistered = "not_registered"
	Malformed     = "malformed"
	Overloaded    = "overloaded"
	NoSession     = "no_session"
	LeaseCap      = "lease_cap"
	TierLate      = "tier_late"
	Unknown       = "unknown" // the look-up's hashes are not kept any more
)

var reasonOf = map[ipc.LookupStatus]string{
	ipc.LookupOff: LoadsOff, ipc.LookupNotRegistered: NotRegistered, ipc.LookupMalformed: Malformed,
	ipc.LookupOverloaded: Overloaded, ipc.LookupNoSession: NoSession, ipc.LookupLeaseCap: LeaseCap,
}

// World is the agent as an explanation reads it. Its functions may be called from any goroutine.
type World struct {
	History *History
	Spaces  func() []report.Space // those that the agent knows
	Index   pool.Index            // of memory and tiers
	Memory  pool.Journal          // of memory alone
	// Ask asks the tiers for blocks of a group until a deadline; nil: there are none.
	Ask   func(s pool.SpaceID, group uint8, h pool.Hashes, deadline time.Time)
	Loads func() bool // whether loads are on
}

// Asked is a look-up, for people.
type Asked struct {
	ID      string    `json:"id"` // 16 hex digits, the end of the last hash
	At      time.Time `json:"at"`
	Space   string    `json:"space"` // hex
	Model   string    `json:"model"`
	Form    string    `json:"form"`
	Session uint64    `json:"session,omitempty"`
	Status  string    `json:"status"`
	Times   uint32    `json:"times"` // asked: with its probes, and while the answer was pending
	Tokens  uint32    `json:"tokens"`
	Own     uint32    `json:"tokens_own"` // that the engine had itself
	Found   uint32    `json:"tokens_found"`
	Blocks  uint32    `json:"hashes"`
	Kept    uint32    `json:"hashes_kept"` // of these, those that can be explained
	Late    bool      `json:"tier_late"`
}

// Recent is the last look-ups, and why those of the last hour found no more.
type Recent struct {
	Reasons []Reason  `json:"reasons"` // most tokens first
	Since   time.Time `json:"since"`   // of the first look-up that they count
	Lookups []Asked   `json:"lookups"`
	Bytes   int64     `json:"history_bytes"` // memory of all that is remembered
}

// Reason is why look-ups found no more, and what that cost.
type Reason struct {
	Reason  string `json:"reason"`
	Tokens  uint64 `json:"tokens"` // that were asked for, and neither found nor the engine's own
	Lookups int    `json:"lookups"`
}

// Explanation is what is known of the blocks of a prompt.
type Explanation struct {
	Asked  *Asked `json:"asked,omitempty"` // nil: it was asked for by hash
	Space  string `json:"space"`
	Model  string `json:"model"`
	Reason string `json:"reason"`
	Text   string `json:"text"` // the same, for people
	Blocks []Fate `json:"blocks"`
}

// Errors of a question.
var (
	ErrUnknown = errors.New("no such look-up among those that are remembered")
	ErrHash    = errors.New("block: allowed: 2 to 64 hex digits of a block hash")
)

// ID returns the name of a look-up.
func (l *Lookup) ID() string { return fmt.Sprintf("%016x", l.Last) }

// missed returns the tokens that were neither found nor the engine's.
func (l *Lookup) missed() uint64 { return uint64(l.Tokens - min(l.Tokens, max(l.Own, l.Found))) }

// Recent returns the last n look-ups, the latest first, and why those of the last hour missed.
func (w *World) Recent(n int) Recent {
	spaces := w.Spaces()
	out := Recent{Reasons: []Reason{}, Lookups: []Asked{}, Bytes: Bytes, Since: w.History.Since().UTC()}
	last := w.History.Last(MaxLookups)
	for i := range last[:min(n, len(last))] {
		out.Lookups = append(out.Lookups, *w.asked(&last[i], spaces))
	}
	begin := time.Now().Add(-summarized).UnixNano()
	for i := range last {
		if last[i].At < begin {
			last = last[:i]
			break
		}
	}
	if len(last) > 0 {
		out.Since = time.Unix(0, last[len(last)-1].At).UTC()
	}
	out.Reasons = append(out.Reasons, w.reasons(last, spaces)...)
	return out
}

// reasons returns why look-ups found no more, by the first block that each did not find.
func (w *World) reasons(last []Lookup, spaces []report.Space) []Reason {
	all := map[string]*Reason{}
	count := func(l *Lookup, reason string) {
		if l.missed() == 0 || reason == Complete {
			return
		}
		if all[reason] == nil {
			all[reason] = &Reason{Reason: reason}
		}
		all[reason].Lookups++
		all[reason].Tokens += l.missed()
	}
	for i := range spaces {
		sp := &spaces[i]
		var of []*Lookup
		var firsts [][]chain // of each, what it did not find first, by group
		var chains []chain
		for j := range last {
			l := &last[j]
			if l.Space != sp.Fingerprint || reasonOf[l.Status] != "" {
				continue
			}
			var mine []chain
			if hashes, kept := w.History.hashesOf(l); kept {
				mine = firstMissed(sp, l, hashes)
			}
			of, firsts, chains = append(of, l), append(firsts, mine), append(chains, mine...)
		}
		t := newTrial(w, sp, spaces, chains)
		for j, l := range of {
			count(l, t.reason(l, firsts[j]))
		}
	}
	for j := range last {
		if reason := reasonOf[last[j].Status]; reason != "" {
			count(&last[j], reason)
		}
	}
	out := []Reason{}
	for _, one := range all {
		out = append(out, *one)
	}
	slices.SortFunc(out, func(a, b Reason) int {
		return cmp.Or(cmp.Compare(b.Tokens, a.Tokens), cmp.Compare(a.Reason, b.Reason))
	})
	return out
}

// firstMissed returns the first block of each group that a look-up did not find.
func firstMissed(sp *report.Space, l *Lookup, hashes pool.Hashes) (out []chain) {
	for _, c := range chainsOf(sp, l, hashes) {
		if c.hashes.N > 0 && !leftToCompute(sp, l, c.group, c.first) {
			out = append(out, chain{c.group, 0, c.hashes.Slice(0, 1)})
		}
	}
	return out
}

// leftToCompute reports whether an answer never has a block: it leaves one token to compute.
func leftToCompute(sp *report.Space, l *Lookup, group uint8, block int) bool {
	return l.Form == ipc.FormOwn && l.Tokens > 0 && block >= int((l.Tokens-1)/sp.Descriptions[group].BlockTokens)
}

// reason returns why a look-up found no more. firsts are the blocks that it did not find first.
func (t *trial) reason(l *Lookup, firsts []chain) string {
	if len(firsts) == 0 {
		if l.Kept+l.Skipped < l.Blocks {
			return Unknown
		}
		return Complete
	}
	reason := ""
	for i := range firsts {
		switch f := t.judge(&firsts[i], l, false); {
		case f[0].Fate != Stored && f[0].Fate != InTier:
			return f[0].Fate
		case l.Late:
			reason = TierLate
		case reason == "":
			reason = f[0].Fate
		}
	}
	return reason
}

func (w *World) asked(l *Lookup, spaces []report.Space) *Asked {
	a := &Asked{
		ID: l.ID(), At: time.Unix(0, l.At).UTC(), Space: hex.EncodeToString(l.Space[:]), Form: l.Form.String(),
		Session: l.Session, Status: report.LookupStatusName(l.Status), Times: l.Times, Tokens: l.Tokens, Own: l.Own,
		Found: l.Found, Blocks: l.Blocks, Kept: l.Kept, Late: l.Late,
	}
	if sp := find(spaces, l.Space); sp != nil {
		a.Model = sp.Model
	}
	return a
}

func find(spaces []report.Space, fp pool.Fingerprint) *report.Space {
	for i := range spaces {
		if spaces[i].Fingerprint == fp {
			return &spaces[i]
		}
	}
	return nil
}

// Request explains the latest look-up with a name.
func (w *World) Request(id string) (*Explanation, error) {
	l, err := w.latest(id)
	if err != nil {
		return nil, err
	}
	return w.explain(l), nil
}

func (w *World) latest(id string) (*Lookup, error) {
	for _, l := range w.History.Last(MaxLookups) {
		if l.ID() == strings.ToLower(id) {
			return &l, nil
		}
	}
	return nil, fmt.Errorf("request %q: %w", id, ErrUnknown)
}

// Prompt returns the blocks of the latest look-up with a name, from the first on that it did not
// find, by group.
func (w *World) Prompt(id string) (s pool.SpaceID, groups []pool.Hashes, err error) {
	l, err := w.latest(id)
	if err != nil {
		return 0, nil, err
	}
	hashes, kept := w.History.hashesOf(l)
	sp := find(w.Spaces(), l.Space)
	if !kept || sp == nil || !sp.Open {
		return 0, nil, fmt.Errorf("request %q: %w", id, ErrUnknown)
	}
	groups = make([]pool.Hashes, len(sp.Descriptions))
	for _, c := range chainsOf(sp, l, hashes) {
		groups[c.group] = c.hashes
	}
	return sp.ID, groups, nil
}

func (w *World) explain(l *Lookup) *Explanation {
	spaces := w.Spaces()
	e := &Explanation{Asked: w.asked(l, spaces), Space: hex.EncodeToString(l.Space[:]), Blocks: []Fate{}}
	hashes, kept := w.History.hashesOf(l)
	sp := find(spaces, l.Space)
	if sp != nil {
		e.Model = sp.Model
	}
	if kept && sp != nil {
		chains := chainsOf(sp, l, hashes)
		t := newTrial(w, sp, spaces, chains)
		for i := range chains {
			e.Blocks = append(e.Blocks, t.judge(&chains[i], l, true)...)
		}
	}
	w.conclude(e, l, sp)
	return e
}

// Block says of each space what became of a block of it with a hash (hex), of the group that has
// it, had it, or refused it; of none if no space knows of it.
func (w *World) Block(hash string) ([]Explanation, error) {
	b, err := hex.DecodeString(hash)
	if err != nil || len(b) == 0 || len(b) > pool.MaxHashLen {
		return nil, ErrHash
	}
	out := []Explanation{}
	spaces := w.Spaces()
	for i := range spaces {
		sp := &spaces[i]
		e := Explanation{Space: hex.EncodeToString(sp.Fingerprint[:]), Model: sp.Model}
		for g := range sp.Descriptions {
			c := chain{uint8(g), 0, pool.Chain(b, len(b))}
			t := newTrial(w, sp, nil, []chain{c})
			if f := t.judge(&c, nil, true); f[0].Fate != NotStored {
				e.Blocks = append(e.Blocks, f...)
			}
		}
		if len(e.Blocks) > 0 {
			e.Reason, e.Text = e.Blocks[0].Fate, sentence(&e.Blocks[0])
			out = append(out, e)
		}
	}
	return out, nil
}

// chainsOf returns the whole blocks of each group that a look-up asked for, from the first one on
// that the engine did not have and that was not found. h are its hashes that were not skipped.
func chainsOf(sp *report.Space, l *Lookup, h pool.Hashes) (chains []chain) {
	for g := range sp.Descriptions {
		if l.Groups != 0 && l.Groups>>g&1 == 0 {
			continue
		}
		scale := max(int(sp.Descriptions[g].BlockTokens/max(sp.HashTokens, 1)), 1)
		first, skipped, kept := int(l.Skipped)/scale, int(l.Skipped), h
		kept.First, kept.Step = (first+1)*scale-1-skipped, scale
		kept.N = max(0, (skipped+h.N)/scale-first)
		chains = append(chains, chain{uint8(g), first, kept})
	}
	return chains
}
