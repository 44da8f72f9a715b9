package events

import (
	"runtime"
	"testing"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/lookup"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
)

// heard are the messages of one session.
type heard struct{ all []*ipc.BlockEvents }

func (h *heard) send(m any) { h.all = append(h.all, m.(*ipc.BlockEvents)) }

func (h *heard) last() *ipc.BlockEvents { return h.all[len(h.all)-1] }

func openDesk(t *testing.T, blockTokens uint32) (*Desk, *dram.Pool, *lookup.Space) {
	p, err := dram.Open(dram.Options{Bytes: 128 << 10, SlabBytes: 4 << 10, Virtual: true})
	if err != nil {
		t.Fatal(err)
	}
	id, err := p.OpenSpace(pool.Spec{
		Shards: 1, Groups: []pool.Group{{BlockTokens: blockTokens, ShardBytes: []uint32{1024}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	d := New(p, nil, "", zap.NewNop())
	t.Cleanup(func() {
		d.Close()
		p.Close()
	})
	return d, p, &lookup.Space{ID: id, Groups: []lookup.Group{{BlockTokens: blockTokens}}}
}

// TestSessionsAreLimited: one more than may be told is refused, until one leaves.
func TestSessionsAreLimited(t *testing.T) {
	d, _, rules := openDesk(t, blockTokens)
	var h heard
	for session := range uint64(maxSubscribers) {
		if d.Serve(session+1, rules, &ipc.NextEvents{Blocks: 1}, 0, h.send); h.last().State != ipc.EventsWhole {
			t.Fatalf("session %d: state %d", session+1, h.last().State)
		}
	}
	if d.Serve(999, rules, &ipc.NextEvents{Blocks: 1}, 0, h.send); h.last().State != ipc.EventsRefused {
		t.Errorf("one more: state %d", h.last().State)
	}
	d.Leave(7)
	if d.Serve(999, rules, &ipc.NextEvents{Blocks: 1}, 0, h.send); h.last().State != ipc.EventsWhole {
		t.Errorf("after one has left: state %d", h.last().State)
	}
	if r := d.Report(); r.Subscribers != maxSubscribers || r.Spaces != 1 {
		t.Errorf("%+v", r)
	}
}

// TestPeerThatDoesNotRead is told to ask again, and no answer is made for it to gather in memory;
// what it asked for to be told anew is not forgotten.
func TestPeerThatDoesNotRead(t *testing.T) {
	d, p, rules := openDesk(t, blockTokens)
	var h heard
	d.Serve(1, rules, &ipc.NextEvents{Blocks: 100}, 0, h.send)
	c := chain(0).Slice(0, 3)
	b := pool.Batch{
		Space: rules.ID, Epoch: 1, Hashes: c, Status: make([]pool.Status, c.N), Slots: make([]pool.Slot, c.N),
	}
	p.Reserve(&b)
	p.Commit(b.Slots, 1, b.Status)
	for i := range c.N {
		m := &ipc.BlockTokens{HashLen: 8, Hashes: c.At(i), Tokens: tokensOf(c.At(i))}
		if i > 0 {
			m.Parent = c.At(i - 1)
		}
		d.Serve(1, rules, m, 0, h.send)
	}
	d.Serve(1, rules, &ipc.NextEvents{Blocks: 100}, 0, h.send)
	if m := h.last(); len(m.Runs) != 1 || len(m.Runs[0].Hashes) != 3*8 || m.State != ipc.EventsWhole {
		t.Fatalf("%+v, want one run of three blocks", m)
	}
	d.Serve(1, rules, &ipc.NextEvents{Req: 7, Blocks: 100, Anew: true}, maxWaiting+1, h.send)
	if m := h.last(); len(m.Runs) != 0 || m.Req != 7 || m.State != ipc.EventsMore {
		t.Fatalf("with messages that wait: %+v", m)
	}
	d.Serve(1, rules, &ipc.NextEvents{Req: 8, Blocks: 100}, 0, h.send)
	if m := h.last(); len(m.Runs) != 1 || len(m.Runs[0].Hashes) != 3*8 || m.Req != 8 || m.State != ipc.EventsWhole {
		t.Fatalf("%+v, want everything anew", m)
	}
}

// TestBlocksThatAreNotTold are counted: too few tokens, no such group, blocks that are too large.
func TestBlocksThatAreNotTold(t *testing.T) {
	d, _, rules := openDesk(t, maxBlockTokens+1)
	var h heard
	say := func(group uint8, tokens int) uint64 {
		d.Serve(1, rules, &ipc.BlockTokens{
			Group: group, HashLen: 8, Hashes: make([]byte, 16), Tokens: make([]byte, 2*tokens*tokenBytes),
		}, 0, h.send)
		return d.Report().Refused
	}
	if n := say(0, 4); n != 0 {
		t.Errorf("%d are refused while nobody asks", n)
	}
	d.Serve(1, rules, &ipc.NextEvents{Blocks: 1}, 0, h.send)
	if n := say(0, maxBlockTokens+1); n != 2 {
		t.Errorf("%d are refused of a group with large blocks, want 2", n)
	}
	if n := say(1, 4); n != 4 {
		t.Errorf("%d are refused after a group that is not there, want 4", n)
	}
	d, _, rules = openDesk(t, blockTokens)
	d.Serve(1, rules, &ipc.NextEvents{Blocks: 1}, 0, h.send)
	if n := say(0, blockTokens-1); n != 2 {
		t.Errorf("%d are refused that have too few tokens, want 2", n)
	}
}

// TestClosedSpaceIsDropped, with what was kept of it.
func TestClosedSpaceIsDropped(t *testing.T) {
	d, p, rules := openDesk(t, blockTokens)
	var h heard
	d.Serve(1, rules, &ipc.NextEvents{Blocks: 1}, 0, h.send)
	d.Leave(1)
	if err := p.CloseSpace(rules.ID); err != nil {
		t.Fatal(err)
	}
	d.compareAll() // as its goroutine does, which may come later
	if r := d.Report(); r.Spaces != 0 {
		t.Errorf("%+v, want no space", r)
	}
}

// watched is a pool that calls looked before blocks are looked up.
type watched struct {
	*dram.Pool
	looked func()
}

func (w *watched) Holds(s pool.SpaceID, group uint8, h pool.Hashes, present []bool) bool {
	if h.N > 0 {
		w.looked()
	}
	return w.Pool.Holds(s, group, h, present)
}

// TestResetIsToldBeforeOthersAreCompared, which may take long.
func TestResetIsToldBeforeOthersAreCompared(t *testing.T) {
	l := newLasting(t)
	l.path = ""
	l.begin()
	views := map[pool.SpaceID]*view{}
	var last *lookup.Space
	for name := byte('a'); name < 'g'; name++ {
		last = l.open(name)
		views[last.ID] = l.follow(1, last)
		l.say(last, int(name))
		l.ask(1, last, views[last.ID])
	}
	d := l.desk
	d.Close() // the rest is what its goroutine does
	l.desk = nil
	d.memory = &watched{l.pool, func() {
		if len(views[last.ID].stored) > 0 {
			t.Error("others are looked at before it is told that a space was reset")
		}
	}}
	d.media[0] = d.memory
	l.desk = d
	l.ask(1, last, views[last.ID])
	l.desk = nil
	if n := len(views[last.ID].stored); n != chainBlocks {
		t.Fatalf("%d blocks are told", n)
	}
	if _, err := l.pool.ResetSpace(last.ID); err != nil {
		t.Fatal(err)
	}
	d.compareAll()
}

// BenchmarkLearn reports the memory and the time that a block costs of which all is told.
func BenchmarkLearn(b *testing.B) {
	const n = 1 << 18
	for b.Loop() {
		l := newLedger(0, 16, defaultLimits())
		var parent []byte
		tokens := make([]byte, l.stride)
		for i := range n {
			var h [32]byte
			h[0], h[1], h[2], h[31] = byte(i), byte(i>>8), byte(i>>16), 1
			if i%64 == 0 {
				parent = nil
			}
			number, _ := l.add(h[:], parent, tokens, nil)
			l.set(number, 1)
			parent = h[:]
		}
		b.ReportMetric(float64(l.bytes())/n, "counted-bytes/block")
		b.StopTimer()
		runtime.GC()
		var with, without runtime.MemStats
		runtime.ReadMemStats(&with)
		runtime.KeepAlive(l)
		runtime.GC() // nothing reads l from here on
		runtime.ReadMemStats(&without)
		b.ReportMetric(float64(with.HeapAlloc-without.HeapAlloc)/n, "bytes/block")
		b.StartTimer()
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/block")
}
