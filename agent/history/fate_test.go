package history

import (
	"strings"
	"testing"
	"time"

	"github.com/kvagent/kvagent/agent/report"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

// empty plays a memory in which nothing is stored.
type empty struct{ pool.Memory }

func (empty) Holds(pool.SpaceID, uint8, pool.Hashes, []bool) bool { return false }

func (empty) Exists(_ pool.SpaceID, _ uint8, _ pool.Hashes, present []bool) { clear(present) }

// Each cause of a departure is told apart, and said to people; the reasons of the last hour too.
func TestEveryCauseHasItsFate(t *testing.T) {
	fp := pool.Fingerprint{1}
	for cause, want := range map[pool.Cause]struct{ fate, text string }{
		pool.ByEviction:   {Evicted, "to make room (class some)"},
		pool.ByBudget:     {OverBudget, "to keep the budget of the engine that stored it"},
		pool.ByAge:        {Incomplete, "because some ranks never stored their part"},
		pool.ByReset:      {WasReset, "by a reset of the space"},
		pool.ByTime:       {Expired, "at the end of the time that its request gave"},
		pool.ByCorruption: {Corrupt, "because its bytes did not verify"},
		pool.ByBadPage:    {BadPage, "because its memory cannot be read any more"},
	} {
		w := &World{
			History: New(), Index: empty{}, Memory: empty{},
			Loads: func() bool { return true },
			Spaces: func() []report.Space {
				groups := []ipc.GroupDesc{{BlockTokens: 16}}
				return []report.Space{{Fingerprint: fp, CacheSpace: report.CacheSpace{Open: true}, HashTokens: 16,
					Descriptions: groups}}
			},
		}
		req := request(1, 2)
		w.History.Left(&pool.Departure{Space: fp, Block: pool.Mark(req.Hashes[:32]), Cause: cause, Class: "some"})
		w.History.Answered(fp, 16, req, &ipc.LookupReply{})
		l := w.History.Last(1)[0]
		e, err := w.Request(l.ID())
		if err != nil {
			t.Fatal(err)
		}
		if e.Reason != want.fate || !strings.Contains(e.Text, want.text) || e.Blocks[0].At.UnixNano() > l.At {
			t.Errorf("cause %d: %q, %q, %+v; want %q and %q", cause, e.Reason, e.Text, e.Blocks, want.fate, want.text)
		}
		if all := w.Recent(1).Reasons; len(all) != 1 || all[0] != (Reason{want.fate, 32, 1}) {
			t.Errorf("cause %d: %+v", cause, all)
		}
	}
}

// Of several departures of a block the one before the look-up counts, and what left is remembered
// as long as it has room, evictions apart from resets.
func TestTheDepartureBeforeTheLookupCounts(t *testing.T) {
	h := New()
	fp, req := pool.Fingerprint{1}, request(1, 1)
	mark := pool.Mark(req.Hashes)
	for _, cause := range []pool.Cause{pool.ByBudget, pool.ByTime} {
		h.Left(&pool.Departure{Space: fp, Block: mark, Cause: cause})
		for now := time.Now().UnixNano(); time.Now().UnixNano() == now; { // until the clock has moved
		}
	}
	sp := &report.Space{Fingerprint: fp}
	w := &World{History: h}
	find := func(at int64) departure {
		d, _ := newTrial(w, sp, nil, []chain{{0, 0, pool.Chain(req.Hashes, 32)}}).departure(blockMark{mark, 0}, at)
		return d
	}
	const ever = 1 << 62
	last := find(ever)
	if d := find(last.at - 1); d.cause != pool.ByBudget || last.cause != pool.ByTime {
		t.Errorf("%+v, and then %+v", d, last)
	}
	if d := find(0); d.at != 0 {
		t.Errorf("before it left: %+v", d)
	}
	for range MaxLeft {
		h.Left(&pool.Departure{Space: fp, Cause: pool.ByReset})
	}
	if d := find(ever); d.cause != pool.ByTime {
		t.Errorf("after as many resets as are remembered: %+v", d)
	}
	for range MaxLeft {
		h.Left(&pool.Departure{Space: fp, Cause: pool.ByEviction})
	}
	if d := find(ever); d.at != 0 {
		t.Errorf("after as many evictions as are remembered: %+v", d)
	}
}
