package agent

import (
	"bytes"
	"encoding/hex"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/guests"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/tier"
)

// pinning is an agent whose blocks may be pinned, and which looks at its clock often.
func pinning(c *rigConfig) { c.joined.KeepPercent, c.Limits.Watch = 50, 10*time.Millisecond }

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
			r := newRig(t, withPool(4<<20), pinning)
			scheduler, workers, answer := r.joinEngine(register("a"))
			if got := workers[0].save(answer.Epoch, chain(1, 8), 0); !all(got, blockOK) {
				t.Fatalf("save: %v", got)
			}
			pin := time.Hour
			if end == nil {
				pin = time.Second
			}
			if got := do(scheduler, ipc.HintPin, chain(1, 12), pin); got.State != ipc.HintAccepted || got.Blocks != 8 {
				t.Errorf("receipt %+v, want 8 blocks", got)
			}
			if h := r.guests.Status().Hints; h.PinnedBlocks != 8 || h.PinnedBytes == 0 || h.PinBudget == 0 {
				t.Errorf("%+v, want 8 blocks that are pinned", h)
			}
			if end != nil {
				end(scheduler)
			}
			r.waitFor("the end of the pins", func(s admin.Status) bool { return s.Hints.PinnedBlocks == 0 })
			if h := r.guests.Status().Hints; h.PinnedBytes != 0 {
				t.Errorf("%d bytes are pinned of no block", h.PinnedBytes)
			}
		})
	}
}

// Pins outlive the engine whose request asked for them, and end with the agent
// (checkNothingLeft).
func TestPinnedBlocksOutliveTheirEngine(t *testing.T) {
	r := newRig(t, withPool(4<<20), pinning)
	scheduler, workers, answer := r.joinEngine(register("a"))
	workers[0].save(answer.Epoch, chain(1, 8), 0)
	do(scheduler, ipc.HintPin, chain(1, 8), time.Hour)
	if got := do(scheduler, ipc.HintDrop, chain(1, 8), time.Hour); got.State != ipc.HintDeferred {
		t.Errorf("receipt %+v, want deferred", got)
	}
	workers[0].close()
	scheduler.close()
	r.waitFor("the end of the engine", func(s admin.Status) bool { return s.Engines == 0 && s.Sessions == 0 })
	if h := r.guests.Status().Hints; h.PinnedBlocks != 8 || h.Pending != 2 {
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
			r := newRig(t, append(options, pinning)...)
			scheduler, workers, answer := r.joinEngine(register("a"))
			workers[0].save(answer.Epoch, chain(1, 8), 0)
			if r.agent.tiers != nil {
				r.waitTier(8)
			}
			do(scheduler, ipc.HintDrop, chain(1, 8)[3*32:], time.Millisecond)
			if over := next[*ipc.Hinted](scheduler).Receipts[0]; over.State != ipc.HintAccepted || over.Blocks != 5 {
				t.Errorf("last receipt %+v, want 5 dropped blocks", over)
			}
			if h := r.guests.Status().Hints; h.Dropped != 5 || h.Pending != 0 {
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
	r := newRig(t, withPool(4<<20), pinning)
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
	if h := r.guests.Status().Hints; h.Ignored != 1 || h.PinnedBlocks != 0 || h.Dropped != 0 {
		t.Errorf("%+v, want one ignored and nothing pinned or dropped", h)
	}
}

// An agent without a budget rejects pins.
func TestNothingIsPinnedWithoutABudget(t *testing.T) {
	without := newRig(t, withPool(4<<20), withGuests(func(o *guests.Options) { o.KeepPercent = 0 }))
	scheduler, workers, answer := without.joinEngine(register("a"))
	workers[0].save(answer.Epoch, chain(1, 8), 0)
	if got := do(scheduler, ipc.HintPin, chain(1, 8), time.Hour); got.State != ipc.HintRejected {
		t.Errorf("without a budget: %+v", got)
	}
}

func TestHintMetricsAtZero(t *testing.T) {
	wantAtStart(t,
		`kvagent_hint_bytes{kind="pinned"} 0`, `kvagent_hints_total{state="rejected"} 0`,
		`kvagent_hint_blocks_total{outcome="helped"} 0`,
	)
}

// A prefetch brings what only a tier has into memory, so that a look-up finds it there at once.
func TestPrefetchBringsBlocksFromATier(t *testing.T) {
	disk := tier.Tier{Name: "disk", Store: pooltest.NewShelf(), Local: true, Write: tier.OnSave}
	r := newRig(t, withPool(4<<20), withTiers(disk), pinning)
	scheduler, workers, answer := r.joinEngine(register("a"))
	workers[0].save(answer.Epoch, chain(1, 8), 0)
	r.waitTier(8)
	r.drop(chain(1, 8)[3*32:])
	if got := do(scheduler, ipc.HintPrefetch, chain(1, 8), time.Hour); got.State != ipc.HintDeferred {
		t.Errorf("receipt %+v, want deferred", got)
	}
	if over := next[*ipc.Hinted](scheduler).Receipts[0]; over.State != ipc.HintAccepted || over.Blocks != 5 {
		t.Errorf("last receipt %+v, want 5 blocks", over)
	}
	if got := r.pool.Stats().Entries; got != 8 {
		t.Errorf("%d blocks are in memory, want 8", got)
	}
	if got := do(scheduler, ipc.HintPrefetch, chain(2, 4), 0); got.State != ipc.HintDeferred {
		t.Errorf("receipt %+v, want deferred", got)
	}
	if over := next[*ipc.Hinted](scheduler).Receipts[0]; over.State != ipc.HintMissing || over.Reason == "" {
		t.Errorf("last receipt %+v, want missing", over)
	}
}

// A fetch brings what another agent has. A look-up that names it waits for its blocks, and finds
// them whichever of the two comes first.
func TestHintFetchesFromAnotherAgent(t *testing.T) {
	x, p, d := newNodes(t)
	x.save(0, 8)
	fetch := &ipc.Hint{
		Actions: []ipc.HintAction{{ID: "7/0", Kind: ipc.HintFetch, Peer: p.addr}},
		Chains:  []ipc.HintChain{{HashLen: 32, Hashes: chain(1, 8)}},
	}
	x.decode.send(fetch)
	if got := next[*ipc.Hinted](x.decode).Receipts[0]; got.State != ipc.HintDeferred {
		t.Errorf("receipt %+v, want deferred", got)
	}
	q := x.remote(8, "hint/7/0", p)
	if got := askUntil(t, x.look, q); got.Status != ipc.LookupHit || got.Tokens != 8*testBlockTokens {
		t.Fatalf("%+v", got)
	}
	if over := next[*ipc.Hinted](x.decode).Receipts[0]; over.State != ipc.HintAccepted || over.Blocks != 8 {
		t.Errorf("last receipt %+v, want 8 blocks", over)
	}
	x.loads(q, 8)
	nothingFetched(p, d)
	if s := d.guests.Status().Transfers; s.Fetches != 1 {
		t.Errorf("%+v, want one fetch", s)
	}
	fetch.Actions[0].ID, fetch.Chains[0].Hashes = "7/1", chain(2, 3)
	x.decode.send(fetch)
	next[*ipc.Hinted](x.decode)
	if over := next[*ipc.Hinted](x.decode).Receipts[0]; over.State != ipc.HintMissing {
		t.Errorf("last receipt %+v, want missing: the other agent has none of the blocks", over)
	}
}

// What is sent to POST /hints is bounded and checked, field by field.
func TestHintBodiesAreChecked(t *testing.T) {
	r := newRig(t, withPool(4<<20), pinning)
	_, workers, answer := r.joinEngine(register("a"))
	workers[0].save(answer.Epoch, chain(1, 8), 0)
	one := hex.EncodeToString(chain(1, 1))
	pin := `"actions": [{"action": "kv.pin"}]}`
	for body, want := range map[string]string{
		"":                "EOF",
		"[]":              "cannot unmarshal",
		`{` + pin + ` {}`: "more than one JSON object",
		`{"session": "a", "actions": [], "else": 1}`:                                "else",
		`{"session": "a", "actions": []}`:                                           "actions: 0, allowed: 1 to 16",
		`{"session": "a", "actions": [{"action": "kv.keep"}]}`:                      "allowed: kv.retain",
		`{"session": "a", "actions": [{"action": "kv.pin", "seconds": 1e99}]}`:      "actions[0].seconds",
		`{"session": "a", "actions": [{"action": "kv.pin", "seconds": -1}]}`:        "actions[0].seconds",
		`{"session": "a", "actions": [{"action": "kv.retain", "priority": 101}]}`:   "actions[0].priority",
		`{"session": "a", "actions": [{"id": "` + strings.Repeat("x", 129) + `"}]}`: "actions[0].action: missing",
		`{"blocks": ["` + one + `", "00"], ` + pin:                                  "blocks[1]",
		`{` + pin:                 "exactly one of them",
		`{"session": "a", ` + pin: "session: nothing is remembered",
		`{"blocks": ["` + one + `"], "group": 9, ` + pin:                                `"missing"`,
		`{"blocks": ["` + one + `"], "actions": [{"action": "kv.pin", "seconds": 60}]}`: `"accepted"`,
		`{"blocks": ["` + strings.Repeat("0", 2<<20) + `"]}`:                            "too large",
	} {
		resp, err := r.adminClient().Post("http://agent/hints", "application/json", strings.NewReader(body))
		check(t, err)
		text, err := io.ReadAll(resp.Body)
		check(t, errors.Join(err, resp.Body.Close()))
		if !strings.Contains(string(text), want) || (resp.StatusCode == 200) != strings.HasPrefix(want, `"`) {
			t.Errorf("%.60s: %d %.200s, want %s", body, resp.StatusCode, text, want)
		}
	}
	if _, body := r.admin("GET", "/hints"); !strings.Contains(body, `"state": "accepted"`) {
		t.Errorf("GET /hints: %s", body)
	}
}
