package hints_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/kvagent/kvagent/agent/hints"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
)

// want checks what became of an action.
func want(t *testing.T, what string, r hints.Receipt, state hints.State, blocks int) {
	t.Helper()
	if r.State != state || r.Blocks != blocks || r.Bytes != int64(blocks)*blockBytes {
		t.Errorf("%s: %+v, want %s with %d blocks", what, r, state, blocks)
	}
	if (state != hints.Accepted) != (r.Reason != "") {
		t.Errorf("%s: reason %q of state %s", what, r.Reason, state)
	}
}

// last returns the newest receipt, as it is now.
func (w *world) last() hints.Receipt { return w.ledger.Receipts()[0] }

// of tells of a session's request, all of whose blocks it was the first to store.
func (w *world) of(session string, h pool.Hashes, actions ...hints.Action) []hints.Receipt {
	own := make([]byte, (h.N+7)/8)
	for i := range own {
		own[i] = 0xff
	}
	return w.ledger.Told(&hints.Hint{
		Space: w.space, Session: session, Actions: actions, Chains: []hints.Chain{{Hashes: h, Own: own}},
	})
}

func TestReceiptsOfRetain(t *testing.T) {
	w := newWorld(t, 0) // a session may retain 4 blocks, all together 16
	a, b := chain("a", 3), chain("b", 9)
	w.save(a)
	w.save(b)
	retain := hints.Action{Kind: hints.Retain, Priority: 90, For: time.Minute}
	want(t, "within the share", w.of("one", a, retain)[0], hints.Accepted, 3)
	want(t, "again, in place of the first", w.of("one", a, retain)[0], hints.Accepted, 3)
	want(t, "beyond the share", w.of("two", b, retain)[0], hints.Clipped, 4)
	if got := w.ledger.Report().Retained; got != 7*blockBytes {
		t.Errorf("%d bytes are retained, want those of 7 blocks", got)
	}
	part := chain("part", 9)
	w.save(part.Slice(0, 3))
	want(t, "beyond the share with what is not stored", w.of("two", part, retain)[0], hints.Clipped, 3)
	want(t, "as before", w.of("two", b, retain)[0], hints.Clipped, 4)
	want(t, "not stored", w.of("one", chain("none", 3), retain)[0], hints.Missing, 0)
	for _, session := range []string{"three", "four", "five"} {
		w.of(session, b, retain)
	}
	if r := w.of("six", b, retain)[0]; r.State != hints.Rejected {
		t.Errorf("beyond what all may retain: %+v", r)
	}
	want(t, "with a priority that retains nothing",
		w.of("six", b, hints.Action{Kind: hints.Retain, Priority: 50, For: time.Minute})[0], hints.Accepted, 9)
	w.pass(time.Minute)
	if got := w.ledger.Report(); got.Retained != 0 || got.Pending != 0 {
		t.Errorf("after their time: %+v", got)
	}
}

func TestRanksNeedAPolicyThatKnowsThem(t *testing.T) {
	p, err := dram.Open(dram.Options{Bytes: poolBytes, SlabBytes: 64 << 10, HugePages: dram.Off})
	check(t, err)
	w := &world{t: t, pool: p}
	w.space, err = p.OpenSpace(pool.Spec{
		Identity: []byte("x"), Shards: 1, Groups: []pool.Group{{BlockTokens: 16, ShardBytes: []uint32{blockBytes}}},
	})
	check(t, err)
	w.ledger = hints.New(hints.Config{Memory: p, Capacity: poolBytes})
	t.Cleanup(func() { w.ledger.Close(); check(t, p.Close()) })
	a := chain("a", 3)
	w.save(a)
	for _, kind := range []hints.Kind{hints.Retain, hints.Demote} {
		want(t, kind.String(), w.do(a, hints.Action{Kind: kind})[0], hints.Rejected, 3)
	}
	for _, kind := range []hints.Kind{hints.Prefetch, hints.Fetch} { // nor are there tiers or other agents
		r := w.do(chain("b", 3), hints.Action{Kind: kind, Peer: "b:1"})[0]
		if r.State != hints.Rejected || r.Reason == "" {
			t.Errorf("%s: %+v", kind, r)
		}
	}
}

// What is lowered in rank, or dropped, is what the session was the first to store: others' blocks
// are safe from a client that knows their prompt.
func TestASessionLowersItsOwnBlocksAlone(t *testing.T) {
	w := newWorld(t, 0)
	a := chain("a", 8)
	w.save(a)
	told := func(own byte, kind hints.Kind) hints.Receipt {
		return w.ledger.Told(&hints.Hint{
			Space: w.space, Session: "one", Actions: []hints.Action{{Kind: kind}},
			Chains: []hints.Chain{{Hashes: a, Own: []byte{own}}},
		})[0]
	}
	for _, kind := range []hints.Kind{hints.Demote, hints.Drop} {
		want(t, kind.String()+" of others' blocks", told(0, kind), hints.Missing, 0)
	}
	want(t, "demoted", told(0b1110_0000, hints.Demote), hints.Accepted, 3)
	w.want("after others' drop", a, 8)
	want(t, "dropped", told(0b1100_0000, hints.Drop), hints.Accepted, 2)
	w.want("after its own drop", a, 6)
}

func TestReceiptsOfDrop(t *testing.T) {
	w := newWorld(t, 0)
	a := chain("a", 8)
	w.save(a)
	want(t, "at once, blocks that others follow", w.drop(a.Slice(0, 4), 0), hints.Clipped, 0)
	want(t, "later", w.drop(a.Slice(6, 8), time.Second), hints.Deferred, 2)
	w.pass(time.Second)
	want(t, "at its time", w.last(), hints.Accepted, 2)
	want(t, "at once", w.drop(a.Slice(4, 6), 0), hints.Accepted, 6) // and those before, which were marked
	want(t, "not stored", w.drop(a, 0), hints.Missing, 0)
	w.want("dropped", a, 0)
}

// A session's last prompt is remembered, and which of its blocks it was the first to store.
func TestSessionsAreRemembered(t *testing.T) {
	w := newWorld(t, poolBytes)
	a := chain("a", 8)
	w.save(a)
	turn := func(part uint32, blocks int, own byte) {
		w.ledger.Told(&hints.Hint{
			Space: w.space, Session: "chat", Part: part, Finish: pool.FinishStop,
			Chains: []hints.Chain{{Hashes: a.Slice(0, blocks), Own: []byte{own}}},
		})
	}
	turn(1, 4, 0b0000_1100)
	turn(2, 8, 0b1111_0000)
	receipts, err := w.ledger.ToldOf("chat", []hints.Action{{Kind: hints.Pin}, {Kind: hints.Demote}})
	check(t, err)
	want(t, "pinned", receipts[0], hints.Accepted, 8)
	want(t, "demoted", receipts[1], hints.Accepted, 6) // of both turns
	if _, err := w.ledger.ToldOf("other", []hints.Action{{Kind: hints.Pin}}); !errors.Is(err, hints.ErrNoSession) {
		t.Errorf("of a session that nobody told of: %v", err)
	}
	for i := range hints.MaxSessions {
		w.of(string(rune('a'+i%26))+time.Duration(i).String(), chain("b", 1))
	}
	if _, err := w.ledger.ToldOf("chat", []hints.Action{{Kind: hints.Pin}}); !errors.Is(err, hints.ErrNoSession) {
		t.Errorf("of the oldest of too many sessions: %v", err)
	}
	if r := w.ledger.Report(); r.Sessions != hints.MaxSessions || r.Ended != 2 {
		t.Errorf("%+v", r)
	}
}

// An action that is over says which of its blocks were used in time.
func TestWhatHelped(t *testing.T) {
	w := newWorld(t, poolBytes)
	a := chain("a", 8)
	w.save(a)
	for kind, helped := range map[hints.Kind]int{hints.Retain: 3, hints.Pin: 3, hints.Demote: 5} {
		w.do(a, hints.Action{Kind: kind, Priority: 50, For: time.Second})
		w.pool.Prefix(w.space, 0, a.Slice(0, 3))
		w.pass(time.Second)
		if r := w.last(); !r.Over || r.Helped != helped || r.Helped+r.InVain != 8 {
			t.Errorf("%s: %+v, want %d blocks that it helped with", kind, r, helped)
		}
	}
	if r := w.ledger.Report(); r.Helped != 11 || r.InVain != 13 {
		t.Errorf("%+v", r)
	}
}

// Each action gets each receipt but those that cannot be. The connector alone defers what waits for
// the end of a request.
func TestEachReceiptOfEachAction(t *testing.T) {
	never := map[hints.State]map[hints.Kind]string{
		hints.Clipped: {hints.Demote: "nothing limits how many blocks may go first"},
		hints.Deferred: {
			hints.Retain: "it ranks at once", hints.Pin: "it pins at once", hints.Demote: "it ranks at once",
		},
	}
	all, tooMany := chain("all", 9), chain("too many", hints.MaxBlocks/16+1)
	for kind := hints.Retain; kind <= hints.Fetch; kind++ {
		for state := hints.Accepted; state <= hints.Missing; state++ {
			if never[state][kind] != "" {
				continue
			}
			w, action, on := newWorld(t, 0), hints.Action{Kind: kind, Peer: "there:1", Priority: 90}, all
			shelf := map[string]pool.Hashes{string(all.At(0)): all}
			brings := kind == hints.Prefetch || kind == hints.Fetch
			if !brings && state != hints.Missing {
				w.save(all)
			}
			switch {
			case state == hints.Accepted && !brings:
				on = all.Slice(6, 9)
			case state == hints.Clipped && brings:
				shelf[string(all.At(0))] = all.Slice(0, 5)
			case state == hints.Clipped && kind == hints.Drop:
				on = all.Slice(0, 6) // others follow
			case state == hints.Deferred && kind == hints.Drop:
				action.For = time.Minute
			case state == hints.Rejected:
				on = tooMany
			case state == hints.Missing:
				clear(shelf)
			}
			_, release := fetching(w, shelf)
			later := make(chan hints.Receipt, 1)
			got := w.ledger.Told(&hints.Hint{
				Space: w.space, Actions: []hints.Action{action}, Chains: []hints.Chain{{Hashes: on}}, Exact: true,
				Later: func(r hints.Receipt) { later <- r },
			})[0]
			if brings && state != hints.Rejected {
				release <- struct{}{}
				if last := <-later; state != hints.Deferred {
					got = last
				}
			}
			if got.State != state || (got.Reason == "") != (state == hints.Accepted) {
				t.Errorf("%s: %+v, want %s", kind, got, state)
			}
		}
	}
}

// fetching is a ledger with tiers and another agent, which have the blocks of shelf. begun has room
// for one prefetch that has begun; each goes on after one release.
func fetching(w *world, shelf map[string]pool.Hashes) (begun, release chan struct{}) {
	w.ledger.Close()
	begun, release = make(chan struct{}, 1), make(chan struct{}, hints.MaxWaiting+1)
	bring := func(h pool.Hashes) {
		if some, ok := shelf[string(h.At(0))]; ok {
			w.save(some)
		}
	}
	w.ledger = hints.New(hints.Config{
		Memory: w.pool, Capacity: poolBytes, PinBudget: 6 * blockBytes, Ranks: true,
		Now: func() time.Time { return w.now },
		Raise: func(ctx context.Context, _ pool.SpaceID, _ uint8, h pool.Hashes) {
			select {
			case begun <- struct{}{}:
			default:
			}
			select {
			case <-release:
				bring(h)
			case <-ctx.Done():
			}
		},
		Fetch: func(_ pool.SpaceID, name, peer string, chains []hints.Chain) (<-chan struct{}, error) {
			if peer != "there:1" || !strings.HasPrefix(name, "hint/") {
				return nil, errors.New("too many fetches run")
			}
			first, ended := chains[0].Hashes, make(chan struct{})
			go func() {
				<-release
				bring(first)
				close(ended)
			}()
			return ended, nil
		},
	})
	return begun, release
}

func TestReceiptsOfPrefetchAndFetch(t *testing.T) {
	a, some, have := chain("a", 8), chain("some", 8), chain("have", 2)
	for _, kind := range []hints.Kind{hints.Prefetch, hints.Fetch} {
		t.Run(kind.String(), func(t *testing.T) {
			w := newWorld(t, 0)
			w.save(have)
			_, release := fetching(w, map[string]pool.Hashes{string(a.At(0)): a, string(some.At(0)): some.Slice(0, 5)})
			later := make(chan hints.Receipt, 1)
			do := func(h pool.Hashes) hints.Receipt {
				return w.ledger.Told(&hints.Hint{
					Space: w.space, Actions: []hints.Action{{ID: "x", Kind: kind, Peer: "there:1", For: time.Second}},
					Chains: []hints.Chain{{Hashes: h}}, Later: func(r hints.Receipt) { later <- r },
				})[0]
			}
			over := func() hints.Receipt {
				release <- struct{}{}
				return <-later
			}
			want(t, "begins", do(a), hints.Deferred, 0)
			want(t, "all of it came", over(), hints.Accepted, 8)
			want(t, "begins", do(some), hints.Deferred, 0)
			want(t, "a part came", over(), hints.Clipped, 5)
			want(t, "begins", do(chain("none", 3)), hints.Deferred, 0)
			want(t, "nothing came", over(), hints.Missing, 0)
			w.pool.Prefix(w.space, 0, a)
			w.now = w.now.Add(time.Second)
			w.ledger.Expire()
			if r := w.ledger.Report(); r.Helped != 8 || r.InVain != 5 {
				t.Errorf("%+v, want 8 blocks that helped", r)
			}
		})
	}
	w := newWorld(t, 0)
	w.save(have)
	begun, _ := fetching(w, nil)
	for _, kind := range []hints.Kind{hints.Prefetch, hints.Fetch} {
		if r := w.do(have, hints.Action{Kind: kind, Peer: "there:1"})[0]; r.State != hints.Accepted || r.Blocks != 2 {
			t.Errorf("in memory already: %+v", r)
		}
	}
	if r := w.do(a, hints.Action{Kind: hints.Fetch, Peer: "elsewhere:1"})[0]; r.State != hints.Rejected {
		t.Errorf("from an agent that is not asked: %+v", r)
	}
	w.do(a, hints.Action{Kind: hints.Prefetch})
	<-begun
	for range hints.MaxWaiting + 1 {
		w.do(a, hints.Action{Kind: hints.Prefetch})
	}
	if r := w.last(); r.State != hints.Rejected || !strings.Contains(r.Reason, "wait") {
		t.Errorf("one too many: %+v", r)
	}
}

func TestActionsAreChecked(t *testing.T) {
	for field, a := range map[string]hints.Action{
		"action":   {},
		"id":       {Kind: hints.Pin, ID: strings.Repeat("x", 129)},
		"priority": {Kind: hints.Retain, Priority: 101},
		"seconds":  {Kind: hints.Pin, For: 25 * time.Hour},
		"from":     {Kind: hints.Fetch},
	} {
		if err := a.Check(); err == nil || !strings.HasPrefix(err.Error(), field+": ") {
			t.Errorf("%+v: %v, want an error about %s", a, err, field)
		}
	}
	fine := hints.Action{Kind: hints.Fetch, Peer: "a:1", Priority: 100, For: hints.MaxTime}
	check(t, fine.Check())
}
