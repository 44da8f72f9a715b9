package events

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math/bits"
	"math/rand/v2"
	"testing"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

// reader is what an operator knows by one tail.
type reader struct {
	t      *testing.T
	tail   *Tail
	stored map[string]held
	told   int // transitions, besides those that were missed
	missed int
	clears int
}

func (w *world) reader(follow bool) *reader {
	tail, err := w.space.desk.Tail(follow, func(pool.SpaceID) bool { return true })
	if err != nil {
		w.t.Fatal(err)
	}
	return &reader{t: w.t, tail: tail, stored: map[string]held{}}
}

// between returns the hashes of a chain from one to another.
func between(first, last []byte) (all []string) {
	prompt := chain(int(binary.LittleEndian.Uint32(last)))
	for i := binary.LittleEndian.Uint32(first[4:]); i <= binary.LittleEndian.Uint32(last[4:]); i++ {
		all = append(all, string(prompt.At(int(i))))
	}
	return all
}

// hear reads one answer.
func (r *reader) hear() (all bool) {
	r.tail.join(false)
	list, all := r.tail.look()
	for i := range list {
		one := &list[i]
		switch one.Kind {
		case Missed:
			r.missed += one.Blocks
			continue
		case Cleared:
			blocks := 0
			for _, in := range r.stored {
				blocks += bits.OnesCount8(uint8(in))
			}
			if r.clears++; one.Blocks != blocks {
				r.t.Fatalf("%d blocks are cleared of %d", one.Blocks, blocks)
			}
			clear(r.stored)
			continue
		}
		r.told += one.Blocks
		hashes := between(one.First, one.Last)
		if hashes[0] != string(one.First) || len(hashes) != one.Blocks ||
			one.Tokens != one.Blocks*blockTokens || one.Before != int(one.First[4])*blockTokens {
			r.t.Fatalf("%d blocks after %d tokens, %x to %x", one.Blocks, one.Before, one.First, one.Last)
		}
		for _, h := range hashes {
			medium := held(1) << (one.Medium - ipc.MediumMemory)
			if (r.stored[h]&medium != 0) == (one.Kind == Stored) {
				r.t.Fatalf("%s in %b: %x, stored before in %b", one.Kind, medium, h, r.stored[h])
			}
			if r.stored[h] ^= medium; r.stored[h] == 0 {
				delete(r.stored, h)
			}
		}
	}
	return all
}

func (w *world) checkReader(r *reader) {
	for !r.hear() {
	}
	want := w.truth(func(h []byte) bool { return w.said[string(h)] })
	for h := range want {
		if r.stored[h] != want[h] {
			w.t.Fatalf("%x is held in %b, and told in %b", h, want[h], r.stored[h])
		}
	}
	if len(r.stored) != len(want) {
		w.t.Fatalf("%d blocks are told, %d held", len(r.stored), len(want))
	}
}

// TestTailsEqualThePool: a tail that reads all the time, one that hardly reads, and one that began
// late, end with what the pool holds, as sessions do.
func TestTailsEqualThePool(t *testing.T) {
	clears := 0
	for seed := range uint64(6) {
		w := newWorld(t, seed, defaultLimits())
		fast, slow := w.reader(false), w.reader(true)
		var late *reader
		for round := range 300 {
			w.step()
			for !fast.hear() {
			}
			switch w.rng.IntN(20) {
			case 0:
				slow.hear()
			case 1:
				if late != nil {
					late.tail.Close()
				}
				late = w.reader(false)
			}
			if round%60 == 59 {
				w.settle()
				w.checkReader(fast)
				w.checkReader(slow)
				if late != nil {
					w.checkReader(late)
				}
			}
		}
		clears += fast.clears
	}
	if clears == 0 {
		t.Error("no reset was told")
	}
}

// TestWhatASlowReaderMissed is what it was not told of what a fast one was.
func TestWhatASlowReaderMissed(t *testing.T) {
	for seed := range uint64(6) {
		w := newWorld(t, seed, defaultLimits())
		w.rng = rand.New(rand.NewPCG(seed, 2))
		fast, slow := w.reader(true), w.reader(true)
		for range 40 {
			for range 30 {
				w.save()
				w.write()
				w.disk.drop(func(string) bool { return w.rng.IntN(10) == 0 }, false)
				w.learn()
				w.pump()
				for !fast.hear() {
				}
			}
			for !slow.hear() {
			}
			if got, want := slow.told+slow.missed, fast.told+fast.missed; got != want {
				t.Fatalf("seed %d: %d told and %d missed, want %d in all", seed, slow.told, slow.missed, want)
			}
		}
		if slow.missed == 0 || fast.missed >= slow.missed {
			t.Errorf("seed %d: the slow one missed %d, the fast one %d", seed, slow.missed, fast.missed)
		}
	}
}

// TestTailTellsWhatIsHeld and ends, or what changes until the desk is closed.
func TestTailTellsWhatIsHeld(t *testing.T) {
	d, p, rules := openDesk(t, blockTokens)
	all := func(pool.SpaceID) bool { return true }
	follow, err := d.Tail(true, all)
	if err != nil {
		t.Fatal(err)
	}
	if !follow.Off() {
		t.Error("there are no events to tell of, and the tail does not say so")
	}
	var h heard
	d.Serve(1, rules, &ipc.NextEvents{Blocks: 100}, 0, h.send)
	c := chain(0).Slice(0, 3)
	b := pool.Batch{
		Space: rules.ID, Epoch: 1, Hashes: c, Status: make([]pool.Status, c.N), Slots: make([]pool.Slot, c.N),
	}
	p.Reserve(&b)
	p.Commit(b.Slots, 1, b.Status)
	var said []byte
	for i := range c.N {
		said = append(said, tokensOf(c.At(i))...)
	}
	m := &ipc.BlockTokens{HashLen: 8, Hashes: c.Blob[:3*8], Tokens: said}
	d.Serve(1, rules, m, 0, h.send)
	got, err := follow.Next(t.Context())
	if err != nil || len(got) != 1 || got[0].Kind != Stored || got[0].Blocks != 3 || got[0].Before != 0 ||
		got[0].Space != rules.ID {
		t.Fatalf("%+v, %v", got, err)
	}
	held, err := d.Tail(false, all)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := held.Next(t.Context()); err != nil || len(got) != 1 || got[0].Blocks != 3 {
		t.Errorf("held: %+v, %v", got, err)
	}
	if _, err := held.Next(t.Context()); !errors.Is(err, io.EOF) {
		t.Errorf("after all was told: %v", err)
	}
	other, err := d.Tail(false, func(pool.SpaceID) bool { return false })
	if err != nil {
		t.Fatal(err)
	}
	if _, err := other.Next(t.Context()); !errors.Is(err, io.EOF) || !other.Off() {
		t.Errorf("a tail that wants no space: %v", err)
	}
	stopped, stop := context.WithCancel(t.Context())
	stop()
	if _, err := follow.Next(stopped); !errors.Is(err, context.Canceled) {
		t.Errorf("a reader that has gone: %v", err)
	}
	held.Close()
	other.Close()
	if err := p.CloseSpace(rules.ID); err != nil {
		t.Fatal(err)
	}
	got, err = follow.Next(t.Context())
	if err != nil || len(got) != 1 || got[0].Kind != Cleared || got[0].Blocks != 3 {
		t.Errorf("the space was closed: %+v, %v", got, err)
	}
	follow.Close()
}

// TestTailsAreLimited, take no place of a session, and end with the desk.
func TestTailsAreLimited(t *testing.T) {
	d, _, rules := openDesk(t, blockTokens)
	var h heard
	for session := range uint64(maxSubscribers) {
		if d.Serve(session+1, rules, &ipc.NextEvents{Blocks: 1}, 0, h.send); h.last().State != ipc.EventsWhole {
			t.Fatalf("session %d: state %d", session+1, h.last().State)
		}
	}
	var open []*Tail
	for range MaxTails {
		one, err := d.Tail(true, func(pool.SpaceID) bool { return true })
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, one)
	}
	if _, err := d.Tail(true, nil); !errors.Is(err, ErrTooManyTails) {
		t.Errorf("one more: %v", err)
	}
	open[1].Close()
	again, err := d.Tail(true, func(pool.SpaceID) bool { return true })
	if err != nil {
		t.Fatalf("after one was closed: %v", err)
	}
	again.Close()
	other := New(d.memory, nil, "", zap.NewNop())
	last, err := other.Tail(true, nil)
	if err != nil {
		t.Fatal(err)
	}
	other.Close()
	if _, err := last.Next(t.Context()); !errors.Is(err, io.EOF) {
		t.Errorf("after the desk was closed: %v", err)
	}
}
