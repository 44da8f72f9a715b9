package agent

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/hints"
	"github.com/kvagent/kvagent/ipc/socketdir"
	"github.com/kvagent/kvagent/mockengine"
	"github.com/kvagent/kvagent/pool/disk"
	"github.com/kvagent/kvagent/pool/fault"
	"github.com/kvagent/kvagent/pool/tier"
)

// noting is an engine's agent that notes the blocks of the last question.
type noting struct {
	mockengine.Agent
	last []string // hashes in hex
}

func (a *noting) Ask(q *mockengine.Question) mockengine.Answer {
	a.last = a.last[:0]
	for i := range q.Hashes {
		a.last = append(a.last, hex.EncodeToString(q.Hashes[i][:]))
	}
	return a.Agent.Ask(q)
}

// A session pauses for a tool until its blocks are on a slow disk alone. With a prefetch at the
// pause the next request finds all of them in memory, as if they had never left it, and saves 95 %
// of the time to its first token that those would save.
func TestPrefetchAtThePause(t *testing.T) {
	times := 31 // that each is measured
	if testing.Short() {
		times = 1
	}
	const blocks, blockTokens, blockBytes = 48, 16, 8 << 10
	below, err := disk.Open(disk.Options{Dirs: []disk.Dir{{Path: filepath.Join(t.TempDir(), "disk"), Bytes: 64 << 20}}})
	check(t, err)
	t.Cleanup(func() { check(t, below.Close()) })
	store, err := fault.New(below, fault.Options{
		Rates: map[fault.Kind]float64{fault.Delay: 1}, MaxDelay: 30 * time.Millisecond,
	})
	check(t, err)
	store.Switch(false)
	r := newRig(t, withPool(16<<20), withTiers(tier.Tier{
		Name: "disk", Store: store, Local: true, Write: tier.OnSave, AskWithin: patience, FetchWithin: patience,
	}))
	cfg := mockengine.Config{
		Name: "tool", Model: "m", Blocks: 2 * blocks, BlockTokens: blockTokens, BlockBytes: blockBytes,
		LookupTimeout: patience,
	}
	check(t, cfg.Validate())
	workers, err := mockengine.NewWorkers(&cfg)
	check(t, err)
	defer workers.Close()
	link := mockengine.NewLink(cfg, mockengine.LinkConfig{Session: r.path(socketdir.Session)}, workers)
	defer link.Close()
	wait, stop := context.WithTimeout(t.Context(), patience)
	defer stop()
	check(t, link.Wait(wait))
	agent := &noting{Agent: link}
	engine := mockengine.NewEngine(cfg, agent, workers)
	serial := uint64(0)
	serve := func(first uint64, n int, unsaved bool) (took time.Duration, o mockengine.Outcome) {
		serial++
		one := mockengine.Request{ID: serial, Output: 1, SkipSave: unsaved}
		for i := range n {
			one.Prompt = append(one.Prompt, first+uint64(i))
		}
		engine.Add(one)
		began := time.Now()
		engine.Run(-1)
		took = time.Since(began)
		if !engine.Drain(patience) {
			t.Fatal("jobs are left")
		}
		return took, engine.Outcomes()[0]
	}
	serve(1, blocks, false)
	session := slices.Clone(agent.last)
	r.waitTier(blocks)
	store.Switch(true)

	hint := func(action string) (got []hints.Receipt) {
		body, err := json.Marshal(map[string]any{"blocks": session, "actions": []any{map[string]any{"action": action}}})
		check(t, err)
		resp, err := r.adminClient().Post("http://agent/hints", "application/json", strings.NewReader(string(body)))
		check(t, err)
		var answer struct{ Receipts []hints.Receipt }
		check(t, json.NewDecoder(resp.Body).Decode(&answer))
		check(t, resp.Body.Close())
		return answer.Receipts
	}
	inMemory := func(n int) func(admin.Status) bool {
		return func(s admin.Status) bool { return s.Pool.Entries == int64(n) }
	}
	spent := map[string][]time.Duration{}
	for i := range times {
		for _, how := range []string{"none", "hint", "oracle"} {
			serve(uint64(1000*(len(spent)+3*i+1)), 2*blocks-1, true) // the engine forgets the session's blocks
			if how != "oracle" {
				hint("kv.drop")
				r.waitFor("no block in memory", inMemory(0))
			}
			if how == "hint" { // the tool ends
				hint("kv.prefetch")
				r.waitFor("all blocks in memory", inMemory(blocks))
			}
			before := store.Counts()[fault.Delay]
			took, o := serve(1, blocks, true)
			if late := store.Counts()[fault.Delay] - before; o.Pool != blocks-1 || (late > 0) != (how == "none") {
				t.Fatalf("%s: %d blocks came from the agent, of %d; %d calls of the disk", how, o.Pool, blocks-1, late)
			}
			spent[how] = append(spent[how], took)
		}
	}
	if testing.Short() {
		return
	}
	var saved []float64
	for i, none := range spent["none"] {
		hint, oracle := spent["hint"][i], spent["oracle"][i]
		saved = append(saved, float64(none-hint)/float64(none-oracle))
	}
	median := func(all []time.Duration) time.Duration { slices.Sort(all); return all[len(all)/2] }
	slices.Sort(saved)
	t.Logf("first token after %v from the disk, %v with a prefetch, %v from memory: %.3f of the time",
		median(spent["none"]), median(spent["hint"]), median(spent["oracle"]), saved[times/2])
	if saved[times/2] < .95 {
		t.Errorf("a prefetch saves %.3f of what memory saves, want .95", saved[times/2])
	}
}
