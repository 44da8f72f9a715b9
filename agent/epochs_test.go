package agent

import (
	"strings"
	"testing"
	"time"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/socketdir"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/tier"
)

// quickResets has a rig's stack ask for resets of other nodes all the time.
func quickResets(c *rigConfig) { c.epochEvery = 10 * time.Millisecond }

// A reset on one node is one on every node that shares a tier: engines there are told the new
// epoch, nothing older is found, and each node finds the blocks that the other one stores from then
// on. That holds for a RESET, for the foreign reset and for cache rm, which are the same.
func TestResetReachesOtherNodes(t *testing.T) {
	for name, reset := range map[string]func(r *rig, scheduler *client, space [16]byte){
		"RESET": func(_ *rig, scheduler *client, _ [16]byte) {
			scheduler.send(&ipc.Reset{Req: 4})
			if got := next[*ipc.ResetDone](scheduler); got.Status != ipc.RegDone || got.Epoch != 2 {
				scheduler.t.Errorf("%+v", got)
			}
		},
		"foreign reset": func(r *rig, _ *client, space [16]byte) {
			socket := &lookupSock{answers: r.agent.sockets.answers, fp: space}
			var reply ipc.LookupReply
			if socket.reset(&reply); reply.Status != ipc.LookupHit {
				r.t.Errorf("%+v", reply)
			}
		},
		"cache rm": func(r *rig, _ *client, _ [16]byte) {
			if code, out := r.admin("POST", "/cache/rm?model=test"); code != 200 || strings.Count(out, `"epoch"`) != 1 {
				r.t.Errorf("%d %s", code, out)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			store := pooltest.NewShelf()
			shared := tier.Tier{
				Name: "shared", Store: store, Write: tier.OnSave, AskWithin: patience, AbsentFor: 10 * time.Millisecond,
			}
			a, b := newRig(t, quickResets, withTiers(shared)), newRig(t, quickResets, withTiers(shared))
			schedulerA, workersA, answer := a.joinEngine(register("a"))
			schedulerB, workersB, _ := b.joinEngine(register("b"))
			question := func(c *client, seed byte) ipc.LookupRequest {
				return ipc.LookupRequest{
					Space: answer.Space, Session: c.welcome.Session, Tokens: 1000, HashLen: 32, Hashes: chain(seed, 8),
				}
			}
			if got := workersB[0].save(1, chain(1, 8), 0); !all(got, blockOK) {
				t.Fatalf("save: %v", got)
			}
			b.waitTier(8)
			reset(a, schedulerA, answer.Space)
			for _, c := range []*client{schedulerB, workersB[0]} {
				if got := next[*ipc.Epoch](c); got.Epoch != 2 {
					t.Errorf("the other node's sessions hear of epoch %d, want 2", got.Epoch)
				}
			}
			if got := askUntil(t, b.asker(socketdir.Lookup), question(schedulerB, 1)); got.Tokens != 0 {
				t.Errorf("%d tokens of before the reset are found on the other node", got.Tokens)
			}
			if got := workersB[0].save(1, chain(2, 8), 0); !all(got, blockStale) {
				t.Errorf("a save of before the reset: %v", got)
			}
			if got := workersB[0].save(2, chain(2, 8), 0); !all(got, blockOK) {
				t.Fatalf("save: %v", got)
			}
			b.waitTier(16)
			if got := askUntil(t, a.asker(socketdir.Lookup), question(schedulerA, 2)); got.Tokens != 8*testBlockTokens {
				t.Errorf("%d tokens of after the reset are found on its node, want %d", got.Tokens, 8*testBlockTokens)
			}
			if got := workersA[0].save(2, chain(3, 8), 0); !all(got, blockOK) {
				t.Fatalf("save: %v", got)
			}
			text := b.metricsText()
			for _, line := range []string{
				`kvagent_resets_total{origin="elsewhere"} 1`, `kvagent_resets_total{origin="collision"} 0`,
				`kvagent_promises_total{event="expired"} 0`,
			} {
				if !strings.Contains(text, line) {
					t.Errorf("metrics have no %s", line)
				}
			}
		})
	}
}

// The blocks of a private generation stay in memory: an engine finds them there, and no tier and no
// other agent gets them. Those of other generations are shared. When nothing of a private space is
// left it is closed.
func TestPrivateGenerationStaysInMemory(t *testing.T) {
	store := pooltest.NewShelf()
	r := newRig(t, withPool(4<<20), withTiers(tier.Tier{Name: "shared", Store: store, Write: tier.OnSave}))
	spaces, shared := map[string]pool.Fingerprint{}, uint64(0)
	for _, generation := range []string{"private:0123456789abcdef0123456789abcdef", "named:v2", ""} {
		m := register("of " + generation)
		m.Identity = append([]ipc.Pair{m.Identity[0], {Key: "generation", Value: generation}}, m.Identity[1:]...)
		scheduler, workers, answer := r.joinEngine(m)
		spaces[generation] = answer.Space
		if got := workers[0].save(answer.Epoch, chain(1, 8), 0); !all(got, blockOK) {
			t.Fatalf("save: %v", got)
		}
		got := askUntil(t, r.asker(socketdir.Lookup), ipc.LookupRequest{
			Space: answer.Space, Session: scheduler.welcome.Session, Tokens: 1000, HashLen: 32, Hashes: chain(1, 8),
		})
		if got.Tokens != 8*testBlockTokens {
			t.Errorf("generation %q: %d tokens are found, want %d", generation, got.Tokens, 8*testBlockTokens)
		}
		if !strings.HasPrefix(generation, "private:") {
			shared += 8
		}
		r.waitTier(shared) // a reset drops what is not written yet
		if _, _, ok := r.agent.OpenSpace(answer.Space); ok == strings.HasPrefix(generation, "private:") {
			t.Errorf("generation %q: other agents may read it: %v", generation, ok)
		}
		if generation != "" {
			scheduler.send(&ipc.Reset{Req: 4})
			if got := next[*ipc.ResetDone](scheduler); got.Status != ipc.RegDone || got.Epoch != answer.Epoch+1 {
				t.Errorf("generation %q: %+v", generation, got)
			}
		}
		workers[0].close()
		scheduler.close()
	}
	stored := map[pool.Fingerprint]int{}
	check(t, store.List(t.Context(), func(k pool.Key, _ int64) bool {
		stored[k.Space]++
		return true
	}))
	for generation, space := range spaces {
		if want := strings.HasPrefix(generation, "private:"); want == (stored[space] == 8) {
			t.Errorf("generation %q: %d blocks are in the tier", generation, stored[space])
		}
	}
	pooltest.Until(t, "the private space is closed", func() bool {
		_, out := r.admin("GET", "/cache")
		return strings.Count(out, `"space"`) == 2
	})
}
