package history

import (
	"fmt"
	"strings"

	"github.com/kvagent/kvagent/agent/report"
)

// conclude sets the reason of an explanation. sp is nil if the agent does not know its space.
func (w *World) conclude(e *Explanation, l *Lookup, sp *report.Space) {
	first := firstMissing(e.Blocks, l, sp)
	if reason, refused := reasonOf[l.Status]; refused {
		e.Reason, e.Text = reason, w.refusal(reason, sp)
		return
	}
	switch {
	case first == nil && len(e.Blocks) == 0:
		e.Reason, e.Text = Unknown, "the hashes of this look-up are not kept any more, or its space is closed"
	case first == nil:
		e.Reason, e.Text = Complete, "all blocks that a hit may have are stored"
	case l.Late && (first.Fate == InTier || first.Fate == Stored):
		e.Reason, e.Text = TierLate, "a tier that has it had not answered in time: "+sentence(first)
	default:
		e.Reason, e.Text = first.Fate, sentence(first)
	}
}

// firstMissing returns the first run of a group that a look-up did not find, but might have; nil:
// there is none.
func firstMissing(all []Fate, l *Lookup, sp *report.Space) *Fate {
	for i := range all {
		f := &all[i]
		if f.Fate == Own || f.Fate == Found {
			continue
		}
		if leftToCompute(sp, l, f.Group, f.From) {
			continue
		}
		return f
	}
	return nil
}

// refusal says why a look-up was answered without what is stored.
func (w *World) refusal(reason string, sp *report.Space) string {
	switch reason {
	case LoadsOff:
		if w.Loads() {
			return "loads were switched off, or the agent was ending; loads are on now"
		}
		return "loads are switched off: kvagent set loads=on"
	case NotRegistered:
		switch {
		case sp == nil:
			return "no engine of the space is registered"
		case sp.Engines == 0:
			return "not all ranks of the engine are registered"
		}
		return "not all ranks of the engine that asked were registered"
	case Overloaded:
		return "the answer was later than the look-up's deadline, so it counted as a miss"
	case NoSession:
		return "the look-up named no session of the space, so nothing could be reserved"
	case LeaseCap:
		return "the engine's leases have reached their cap, half of the pool, so nothing could be reserved"
	}
	return "the agent could not read the look-up"
}

// sentence says what became of a run of blocks.
func sentence(f *Fate) string {
	where := fmt.Sprintf("block %d", f.From)
	if f.To > f.From {
		where = fmt.Sprintf("blocks %d to %d", f.From, f.To)
	}
	return fmt.Sprintf("group %d, %s: %s", f.Group, where, f.Story())
}

// Story says what became of the blocks of a run.
func (f *Fate) Story() string {
	if f.Since {
		return f.story() + "; stored since then"
	}
	return f.story()
}

func (f *Fate) story() string {
	when := ""
	if f.At != nil {
		when = " at " + f.At.Format("2006-01-02 15:04:05.000Z")
	}
	switch f.Fate {
	case Own:
		return "the engine had it itself"
	case Found:
		return "found"
	case Stored:
		return "stored now"
	case InTier:
		return "in a tier, not in memory"
	case Evicted:
		class := "the least recently used"
		if f.Class != "" {
			class = "class " + f.Class
		}
		return fmt.Sprintf("evicted%s to make room (%s)", when, class)
	case OverBudget:
		return fmt.Sprintf("evicted%s to keep the budget of the engine that stored it", when)
	case Incomplete:
		return "dropped" + when + " because some ranks never stored their part"
	case WasReset:
		by := ""
		if f.By != "" {
			by = " by " + f.By
		}
		return fmt.Sprintf("dropped%s by a reset of the space%s", when, by)
	case Expired:
		return "dropped" + when + " at the end of the time that its request gave"
	case Corrupt:
		return "dropped" + when + " because its bytes did not verify"
	case BadPage:
		return "dropped" + when + " because its memory cannot be read any more"
	case NotSaved:
		return fmt.Sprintf("a save of it%s was refused: %s", when, f.Why)
	case OtherSpace:
		return fmt.Sprintf("stored in another space, %s, which differs in %s", f.Space, fieldsOf(f.Differences))
	}
	return "not stored until then, as far as the agent remembers"
}

func fieldsOf(all []Difference) string {
	var parts []string
	for _, d := range all {
		parts = append(parts, fmt.Sprintf("%s (asked: %q, stored: %q)", d.Field, d.Asked, d.Has))
	}
	if len(parts) == 0 {
		return "its shards"
	}
	return strings.Join(parts, ", ")
}
