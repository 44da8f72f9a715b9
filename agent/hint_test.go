package agent

import (
	"bytes"
	"slices"
	"testing"
	"time"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/tier"
)

// pinning is an agent whose blocks may be pinned, and which looks at its clock often.
func pinning(c *Config) { c.KeepPercent, c.Limits.Watch = 50, 10*time.Millisecond }

// do sends one action on blocks, and returns its first receipt.
func do(c *client, kind uint8, hashes []byte, lasts time.Duration) ipc.HintReceipt {
	c.send(&ipc.Hint{
		Actions: []ipc.HintAction{{ID: "x", Kind: kind, MS: uint32(lasts.Milliseconds())}},
		Chains:  []ipc.HintChain{{HashLen: 32, Hashes: hashes, Own: bytes.Repeat([]byte{0xff}, (len(hashes)/32+7)/8)}},
	})
	return next[*ipc.Hinted](c).Receipts[0]
}

func TestPinnedBlocks(t *testing.T) {
	for name, end := range map[string]func(scheduler *client){
		"until their time": nil,
		"until a reset": func(scheduler *client) {
			scheduler.send(&ipc.Reset{Req: 5})
			next[*ipc.ResetDone](scheduler)
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, withPool(4<<20), withConfig(pinning))
			scheduler, workers, answer := r.joinEngine(register("a"))
			if got := workers[0].save(answer.Epoch, chain(1, 8), 0); !all(got, ipc.BlockOK) {
				t.Fatalf("save: %v", got)
			}
			pin := time.Hour
			if end == nil {
				pin = time.Second
			}
			if got := do(scheduler, ipc.HintPin, chain(1, 12), pin); got.State != ipc.HintAccepted || got.Blocks != 8 {
				t.Errorf("receipt %+v, want 8 blocks", got)
			}
			if h := r.agent.Status().Hints; h.PinnedBlocks != 8 || h.PinnedBytes == 0 || h.PinBudget == 0 {
				t.Errorf("%+v, want 8 blocks that are pinned", h)
			}
			if end != nil {
				end(scheduler)
			}
			r.waitFor("the end of the pins", func(s admin.Status) bool { return s.Hints.PinnedBlocks == 0 })
			if h := r.agent.Status().Hints; h.PinnedBytes != 0 {
				t.Errorf("%d bytes are pinned of no block", h.PinnedBytes)
			}
		})
	}
}

// Pins outlive the engine whose request asked for them, and end with the agent
// (checkNothingLeft).
func TestPinnedBlocksOutliveTheirEngine(t *testing.T) {
	r := newRig(t, withPool(4<<20), withConfig(pinning))
	scheduler, workers, answer := r.joinEngine(register("a"))
	workers[0].save(answer.Epoch, chain(1, 8), 0)
	do(scheduler, ipc.HintPin, chain(1, 8), time.Hour)
	if got := do(scheduler, ipc.HintDrop, chain(1, 8), time.Hour); got.State != ipc.HintDeferred {
		t.Errorf("receipt %+v, want deferred", got)
	}
	workers[0].close()
	scheduler.close()
	r.waitFor("the end of the engine", func(s admin.Status) bool { return s.Engines == 0 && s.Sessions == 0 })
	if h := r.agent.Status().Hints; h.PinnedBlocks != 8 || h.Pending != 2 {
		t.Errorf("%+v, want 8 pinned blocks, and two actions that go on", h)
	}
	r.agent.Close()
	if st := r.pool.Stats(); st.Pinned != 0 {
		t.Errorf("%d bytes are pinned after the agent's end", st.Pinned)
	}
}

func TestBriefBlocksAreDropped(t *testing.T) {
	for name, options := range map[string][]rigOption{
		"of memory alone": {withPool(4 << 20)},
		"above a tier": {withPool(4 << 20), withTiers(tier.Tier{
			Name: "shelf", Store: pooltest.NewShelf(), Write: tier.OnSave, AskWithin: patience,
		})},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, append(options, withConfig(pinning))...)
			scheduler, workers, answer := r.joinEngine(register("a"))
			workers[0].save(answer.Epoch, chain(1, 8), 0)
			if r.agent.tiers != nil {
				r.waitTier(8)
			}
			do(scheduler, ipc.HintDrop, chain(1, 8)[3*32:], time.Millisecond)
			if over := next[*ipc.Hinted](scheduler).Receipts[0]; over.State != ipc.HintAccepted || over.Blocks != 5 {
				t.Errorf("last receipt %+v, want 5 dropped blocks", over)
			}
			if h := r.agent.Status().Hints; h.Dropped != 5 || h.Pending != 0 {
				t.Errorf("%+v, want 5 dropped blocks", h)
			}
			if got := r.pool.Stats().Entries; got != 3 {
				t.Errorf("%d blocks are in memory, want the 3 that were not to be dropped", got)
			}
		})
	}
}

// A session reaches the blocks of its own space alone, and one without a space none.
func TestHintsOnOthersBlocksAreMissing(t *testing.T) {
	r := newRig(t, withPool(4<<20), withConfig(pinning))
	_, workers, answer := r.joinEngine(register("a"))
	workers[0].save(answer.Epoch, chain(1, 8), 0)
	stranger := r.dial()
	if got := do(stranger, ipc.HintDrop, chain(1, 8), 0); got.State != ipc.HintRejected || got.Reason == "" {
		t.Errorf("without a space: %+v", got)
	}
	other := register("b")
	other.Identity = slices.Clone(other.Identity)
	for i := range other.Identity {
		if other.Identity[i].Key == "tenant" {
			other.Identity[i].Value = "other"
		}
	}
	scheduler, _, _ := r.joinEngine(other)
	for kind := range uint8(ipc.HintDrop) {
		if got := do(scheduler, kind+1, chain(1, 8), time.Millisecond); got.State != ipc.HintMissing {
			t.Errorf("of another space: %+v", got)
		}
	}
	if h := r.agent.Status().Hints; h.Ignored != 1 || h.PinnedBlocks != 0 || h.Dropped != 0 {
		t.Errorf("%+v, want one ignored and nothing pinned or dropped", h)
	}
}

// A pool that takes no hints rejects them; so does an agent without a budget reject pins.
func TestNothingIsPinnedWithoutABudget(t *testing.T) {
	without := newRig(t, withPool(4<<20), withConfig(func(c *Config) { c.KeepPercent = 0 }))
	scheduler, workers, answer := without.joinEngine(register("a"))
	workers[0].save(answer.Epoch, chain(1, 8), 0)
	if got := do(scheduler, ipc.HintPin, chain(1, 8), time.Hour); got.State != ipc.HintRejected {
		t.Errorf("without a budget: %+v", got)
	}
	unable := newRig(t, withBarePool(), withConfig(pinning))
	scheduler, _, _ = unable.joinEngine(register("a"))
	if got := do(scheduler, ipc.HintPin, chain(1, 8), time.Hour); got.State != ipc.HintRejected {
		t.Errorf("with a pool that cannot: %+v", got)
	}
	if h := unable.agent.Status().Hints; h.Ignored != 1 {
		t.Errorf("with a pool that cannot: %+v", h)
	}
}

func TestHintMetricsAtZero(t *testing.T) {
	wantAtStart(t,
		`kvagent_hint_bytes{kind="pinned"} 0`, `kvagent_hints_total{state="rejected"} 0`,
		`kvagent_hint_blocks_total{outcome="helped"} 0`,
	)
}
