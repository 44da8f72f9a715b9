package agent

import (
	"slices"
	"testing"
	"time"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/tier"
)

// keeping is an agent whose blocks may be kept, and which looks at its clock often.
func keeping(c *Config) { c.KeepPercent, c.Limits.Watch = 50, 10*time.Millisecond }

// keepOf asks to keep blocks, or to drop them.
func keepOf(hashes []byte, pin, ttl time.Duration) *ipc.Keep {
	return &ipc.Keep{
		HashLen: 32, Hashes: hashes, PinMS: uint32(pin.Milliseconds()), TTLMS: uint32(ttl.Milliseconds()),
	}
}

func TestKeptBlocks(t *testing.T) {
	for name, end := range map[string]func(scheduler *client){
		"until their time": nil,
		"until a reset": func(scheduler *client) {
			scheduler.send(&ipc.Reset{Req: 5})
			next[*ipc.ResetDone](scheduler)
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, withPool(4<<20), withConfig(keeping))
			scheduler, workers, answer := r.joinEngine(register("a"))
			if got := workers[0].save(answer.Epoch, chain(1, 8), 0); !all(got, ipc.BlockOK) {
				t.Fatalf("save: %v", got)
			}
			pin := time.Hour
			if end == nil {
				pin = time.Second
			}
			scheduler.send(keepOf(chain(1, 12), pin, 0))
			scheduler.sync()
			if k := r.agent.Status().Keep; k.Blocks != 8 || k.Bytes == 0 || k.Budget == 0 || k.Refused != 0 {
				t.Errorf("%+v, want 8 blocks that are kept", k)
			}
			if end != nil {
				end(scheduler)
			}
			r.waitFor("the end of what was kept", func(s admin.Status) bool { return s.Keep.Blocks == 0 })
			if k := r.agent.Status().Keep; k.Bytes != 0 {
				t.Errorf("%d bytes are kept of no block", k.Bytes)
			}
		})
	}
}

// Blocks that a request wanted kept outlive its engine; keeping ends with the agent
// (checkNothingLeft).
func TestKeptBlocksOutliveTheirEngine(t *testing.T) {
	r := newRig(t, withPool(4<<20), withConfig(keeping))
	scheduler, workers, answer := r.joinEngine(register("a"))
	workers[0].save(answer.Epoch, chain(1, 8), 0)
	scheduler.send(keepOf(chain(1, 8), time.Hour, time.Hour))
	scheduler.sync()
	workers[0].close()
	scheduler.close()
	r.waitFor("the end of the engine", func(s admin.Status) bool { return s.Engines == 0 && s.Sessions == 0 })
	if k := r.agent.Status().Keep; k.Blocks != 8 || k.Brief != 8 {
		t.Errorf("%+v, want 8 blocks that are kept", k)
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
			r := newRig(t, append(options, withConfig(keeping))...)
			scheduler, workers, answer := r.joinEngine(register("a"))
			workers[0].save(answer.Epoch, chain(1, 8), 0)
			if r.agent.tiers != nil {
				r.waitTier(8)
			}
			scheduler.send(keepOf(chain(1, 8)[3*32:], 0, time.Millisecond))
			r.waitFor("dropped blocks", func(s admin.Status) bool { return s.Keep.Dropped == 5 && s.Keep.Brief == 0 })
			if got := r.pool.Stats().Entries; got != 3 {
				t.Errorf("%d blocks are in memory, want the 3 that were not to be dropped", got)
			}
		})
	}
}

// A session reaches the blocks of its own space alone, and one without a space none.
func TestKeepsOfOthersAreIgnored(t *testing.T) {
	r := newRig(t, withPool(4<<20), withConfig(keeping))
	_, workers, answer := r.joinEngine(register("a"))
	workers[0].save(answer.Epoch, chain(1, 8), 0)
	stranger := r.dial()
	stranger.send(keepOf(chain(1, 8), time.Millisecond, time.Millisecond))
	stranger.sync()
	other := register("b")
	other.Identity = slices.Clone(other.Identity)
	for i := range other.Identity {
		if other.Identity[i].Key == "tenant" {
			other.Identity[i].Value = "other"
		}
	}
	scheduler, _, _ := r.joinEngine(other)
	scheduler.send(keepOf(chain(1, 8), time.Millisecond, time.Millisecond))
	scheduler.sync()
	r.waitFor("the end of their time", func(s admin.Status) bool { return s.Keep.Brief == 0 })
	if k := r.agent.Status().Keep; k.Ignored != 1 || k.Blocks != 0 || k.Dropped != 0 {
		t.Errorf("%+v, want one ignored and nothing kept or dropped", k)
	}
}

// A pool that cannot keep blocks ignores it; so does an agent without a budget, which counts the
// blocks.
func TestNothingIsKeptWithoutABudget(t *testing.T) {
	without := newRig(t, withPool(4<<20), withConfig(func(c *Config) { c.KeepPercent = 0 }))
	scheduler, workers, answer := without.joinEngine(register("a"))
	workers[0].save(answer.Epoch, chain(1, 8), 0)
	scheduler.send(keepOf(chain(1, 8), time.Hour, 0))
	scheduler.sync()
	if k := without.agent.Status().Keep; k.Blocks != 0 || k.Refused != 8 {
		t.Errorf("without a budget: %+v", k)
	}
	unable := newRig(t, withBarePool(), withConfig(keeping))
	scheduler, _, _ = unable.joinEngine(register("a"))
	scheduler.send(keepOf(chain(1, 8), time.Hour, 0))
	scheduler.sync()
	if k := unable.agent.Status().Keep; k.Ignored != 1 {
		t.Errorf("with a pool that cannot: %+v", k)
	}
}

func TestKeepMetricsAtZero(t *testing.T) {
	wantAtStart(t,
		"kvagent_kept_bytes 0", "kvagent_keeps_refused_total 0",
	)
}
