package hints_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvagent/kvagent/agent/hints"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/advisor"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/evict"
)

// With the pool's own policy what is retained outlives as many new blocks as the pool has, what is
// demoted goes before anything else, and neither is for longer than its time. A wish is also about
// blocks that a look-up has asked for and that are stored later.
func TestRanksHold(t *testing.T) {
	for name, c := range map[string]struct {
		action hints.Action
		before int // blocks stored when it is told
		others int // blocks stored since
		want   int
	}{
		"retained":       {hints.Action{Kind: hints.Retain, Priority: 100, For: time.Hour}, 8, 400, 8},
		"retained early": {hints.Action{Kind: hints.Retain, Priority: 100, For: time.Hour}, 2, 400, 8},
		"as is":          {hints.Action{Kind: hints.Retain, Priority: 50, For: time.Hour}, 8, 400, 0},
		"demoted":        {hints.Action{Kind: hints.Demote, For: time.Hour}, 8, 32, 0},
	} {
		t.Run(name, func(t *testing.T) {
			now := time.Unix(1_000, 0)
			p, err := dram.Open(dram.Options{
				Bytes: 256 * blockBytes, SlabBytes: 64 << 10, HugePages: dram.Off,
				Advisor: advisor.New(evict.Named(evict.HazardName), func() time.Time { return now }),
				Clock:   func() time.Time { return now }, HashSeed: 1,
			})
			check(t, err)
			w := &world{t: t, pool: p}
			w.space, err = p.OpenSpace(pool.Spec{
				Identity: []byte("x"), Shards: 1,
				Groups: []pool.Group{{BlockTokens: 16, ShardBytes: []uint32{blockBytes}}},
			})
			check(t, err)
			w.ledger = hints.New(hints.Config{
				Memory: p, Capacity: 256 * blockBytes, Ranks: true, Now: func() time.Time { return now },
			})
			t.Cleanup(func() { w.ledger.Close(); check(t, p.Close()) })
			for i := range 15 {
				w.save(chain(fmt.Sprint("old", i), 16))
			}
			a := chain("a", 8)
			p.Prefix(w.space, 0, a)
			w.save(a.Slice(0, c.before))
			now = now.Add(time.Second)
			want(t, "told", w.of("chat", a, c.action)[0], hints.Accepted, c.before)
			w.save(a)
			for i := range c.others / 16 {
				now = now.Add(time.Second)
				h := chain(fmt.Sprint("new", i), 16)
				p.Prefix(w.space, 0, h)
				w.save(h)
			}
			w.want("since", a, c.want)
		})
	}
}
