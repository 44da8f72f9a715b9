package peer

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/servertest"
)

// tlsAuth returns an Auth by certificates that are valid for 127.0.0.1.
func tlsAuth(t testing.TB) Auth {
	t.Helper()
	dir := t.TempDir()
	servertest.Certificate(t, dir)
	cert, key := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	a, err := LoadTLS(cert, key, cert)
	check(t, err)
	return a
}

// TestFetch: whatever the shapes, every byte of every block arrives, and a second fetch asks for
// none.
func TestFetch(t *testing.T) {
	for _, c := range []struct {
		shards int
		bytes  uint32
		blocks int
		tls    bool
		change func(*ClientConfig)
	}{
		{shards: 1, bytes: 64 << 10, blocks: 150},
		{shards: 3, bytes: 5000, blocks: 150},
		{shards: 4, bytes: 2, blocks: 20},
		{shards: 1, bytes: 3 << 20, blocks: 8},
		{shards: 2, bytes: 40_000, blocks: 60, tls: true},
		{shards: 1, bytes: 64 << 10, blocks: 100, change: func(c *ClientConfig) { c.Streams = 1 }},
		{shards: 2, bytes: 64 << 10, blocks: 60, change: func(c *ClientConfig) {
			c.Streams, c.WindowBytes, c.BatchBytes = 5, 1<<20, MaxBatchBytes
		}},
	} {
		t.Run(fmt.Sprint(c.shards, "x", c.bytes, " tls ", c.tls), func(t *testing.T) {
			spec := specOf(c.shards, c.bytes)
			p, d := newAgent(t, 256<<20, spec), newAgent(t, 256<<20, spec)
			cfg, ccfg := p.config(), d.clientConfig()
			if c.tls {
				cfg.Auth = tlsAuth(t)
				ccfg.Auth = cfg.Auth
			}
			if c.change != nil {
				c.change(&ccfg)
			}
			h := chain("a", c.blocks)
			p.save(h)
			p.set("r", Complete, uint32(16*c.blocks))
			s, client := serve(t, cfg), newClient(t, ccfg)
			got, err := fetchAll(t, client, s.Addr().String(), d.request("r", h))
			if err != nil || got.End != EndComplete || got.Blocks != 2*c.blocks {
				t.Fatalf("%+v, %v", got, err)
			}
			if n := d.has(h); n != 2*c.blocks {
				t.Fatalf("%d of %d blocks are there", n, 2*c.blocks)
			}
			got, err = fetchAll(t, client, s.Addr().String(), d.request("r", h))
			if err != nil || got.Failed[Had] != 2*c.blocks {
				t.Fatalf("again: %+v, %v", got, err)
			}
			check(t, s.Close())
			if sent, stored := s.Stats().Bytes, client.Stats().Bytes; sent != stored {
				t.Errorf("%d bytes were sent, %d stored", sent, stored)
			}
		})
	}
}

// TestPush: blocks that are stored after the subscription arrive while the transfer is open.
func TestPush(t *testing.T) {
	spec := specOf(2, 4096)
	p, d := newAgent(t, 16<<20, spec), newAgent(t, 16<<20, spec)
	s, client := serve(t, p.config()), newClient(t, d.clientConfig())
	h := chain("a", 90)
	arrived := make(chan int, 1000)
	type outcome struct {
		Result
		err error
	}
	done := make(chan outcome, 1)
	r := d.request("r", h)
	r.Early = true
	go func() {
		res, err := fetchWith(t.Context(), t, client, s.Addr().String(), r,
			func(blocks int, _ int64) { arrived <- blocks })
		done <- outcome{res, err}
	}()
	for step := range 3 {
		if step == 1 {
			p.set("r", Open, 90*16)
		}
		p.save(h.Slice(30*step, 30*step+30))
		for n := 0; n < 60; {
			n += <-arrived
		}
		if got := d.has(h); got != 60*(step+1) {
			t.Fatalf("after step %d there are %d blocks", step, got)
		}
	}
	if o := <-done; o.err != nil || o.End != EndComplete || o.Blocks != 180 {
		t.Fatalf("%+v", o)
	}
}

// TestCompleteWithLess: what P did not store is not waited for.
func TestCompleteWithLess(t *testing.T) {
	spec := specOf(1, 4096)
	p, d := newAgent(t, 16<<20, spec), newAgent(t, 16<<20, spec)
	s, client := serve(t, p.config()), newClient(t, d.clientConfig())
	h := chain("a", 50)
	p.save(h.Slice(0, 20))
	p.saveGroup(0, h.Slice(30, 40), 1) // with a hole before it
	p.set("r", Complete, 320)
	got, err := fetchAll(t, client, s.Addr().String(), d.request("r", h))
	if err != nil || got.End != EndComplete || got.Tokens != 320 || got.Blocks != 50 || got.Failed[NotStored] != 50 {
		t.Fatalf("%+v, %v", got, err)
	}
	if n := d.has(h); n != 50 {
		t.Fatalf("%d blocks", n)
	}
}

// TestLongPrompt: of a prompt with more blocks than are looked up at each change, those that are
// stored next to each other arrive at once, and all of them in the end.
func TestLongPrompt(t *testing.T) {
	spec := specOf(1, 64)
	p, d := newAgent(t, 64<<20, spec), newAgent(t, 64<<20, spec)
	s, client := serve(t, p.config()), newClient(t, d.clientConfig())
	h := chain("a", 12_000)
	p.set("r", Open, 0)
	arrived, done := make(chan int, 1<<16), make(chan Result, 1)
	r := d.request("r", h)
	r.Groups = r.Groups[:1]
	go func() {
		got, err := fetchWith(t.Context(), t, client, s.Addr().String(), r, func(n int, _ int64) { arrived <- n })
		if err != nil {
			t.Error(err)
		}
		done <- got
	}()
	store := func(from, to int) {
		p.saveGroup(0, h.Slice(from, to), 1)
		p.change(func() {})
		for n := 0; n < to-from; {
			n += <-arrived
		}
	}
	store(0, 3000)
	for from := 3000; from < 6000; from += 600 {
		store(from, from+600)
	}
	p.saveGroup(0, h.Slice(9000, 9100), 1) // far ahead: it may take some changes
	for n := 0; n < 100; {
		p.change(func() {})
		select {
		case k := <-arrived:
			n += k
		default:
			runtime.Gosched()
		}
	}
	p.saveGroup(0, h.Slice(11_900, 12_000), 1)
	p.set("r", Complete, 0)
	if got := <-done; got.Blocks != 6200 || got.Failed[NotStored] != 5800 || d.has(h) != 6200 {
		t.Errorf("%+v", got)
	}
}

// TestPartialEntry: an entry that lacks a shard at the sender is not announced, and one
// that lacks a shard at the receiver gets that shard alone.
func TestPartialEntry(t *testing.T) {
	spec := specOf(3, 4096)
	p, d := newAgent(t, 16<<20, spec), newAgent(t, 16<<20, spec)
	s, client := serve(t, p.config()), newClient(t, d.clientConfig())
	h := chain("a", 4)
	p.saveGroup(0, h.Slice(0, 2), 3)
	p.saveGroup(0, h.Slice(2, 4), 2)
	d.saveGroup(0, h.Slice(0, 1), 2)
	r := d.request("", h)
	r.Groups = r.Groups[:1]
	got, err := fetchAll(t, client, s.Addr().String(), r)
	if err != nil || got.End != EndUnknown || got.Blocks != 2 || got.Failed[NotStored] != 2 ||
		got.Bytes != 4*4096+2+0+1+2 {
		t.Fatalf("%+v, %v", got, err)
	}
	if n := d.has(h); n != 2 {
		t.Fatalf("%d blocks", n)
	}
	p.saveGroup(0, h, 3) // partial ones are not to be left
}

// TestNoRoom: blocks for which there is no slot are not asked for.
func TestNoRoom(t *testing.T) {
	spec := specOf(1, 64<<10)
	p, d := newAgent(t, 16<<20, spec), newAgent(t, 1<<20, spec)
	s, client := serve(t, p.config()), newClient(t, d.clientConfig())
	mine := chain("mine", 8)
	d.saveGroup(0, mine, 1)
	n, refs, _ := d.Pin(d.space, 0, mine, 1<<40, nil)
	if n != 8 {
		t.Fatalf("%d pinned", n)
	}
	defer d.Unpin(refs)
	h := chain("a", 40)
	p.save(h)
	r := d.request("", h)
	r.Groups = r.Groups[:1]
	got, err := fetchAll(t, client, s.Addr().String(), r)
	if err != nil || got.Blocks+got.Failed[Busy] != 40 || got.Failed[Busy] == 0 || got.Blocks == 0 {
		t.Fatalf("%+v, %v", got, err)
	}
	check(t, s.Close())
	if sent := s.Stats().Blocks; int(sent) != got.Blocks {
		t.Errorf("%d blocks were sent, %d stored", sent, got.Blocks)
	}
}

// TestResetHere: blocks of before a reset of the local space are not stored after it.
func TestResetHere(t *testing.T) {
	spec := specOf(1, 4096)
	p, d := newAgent(t, 16<<20, spec), newAgent(t, 16<<20, spec)
	s, client := serve(t, p.config()), newClient(t, d.clientConfig())
	h := chain("a", 20)
	p.save(h)
	r := d.request("", h)
	_, err := d.ResetSpace(d.space)
	check(t, err)
	got, err := fetchAll(t, client, s.Addr().String(), r)
	if err != nil || got.Failed[Stale] != 40 {
		t.Fatalf("%+v, %v", got, err)
	}
}

// TestEvictedMeanwhile: a block that was announced and evicted is missing, and nothing else is.
func TestEvictedMeanwhile(t *testing.T) {
	spec := specOf(1, 4096)
	p, d := newAgent(t, 16<<20, spec), newAgent(t, 16<<20, spec)
	cfg := p.config()
	h := chain("a", 40)
	p.save(h)
	cfg.Slots = &beforeAcquire{Slots: p, do: func(b *pool.Batch) {
		if b.Group == 1 {
			_, err := p.ResetSpace(p.space)
			check(t, err)
		}
	}}
	ccfg := d.clientConfig()
	ccfg.Streams = 1
	s, client := serve(t, cfg), newClient(t, ccfg)
	got, err := fetchAll(t, client, s.Addr().String(), d.request("", h))
	if err != nil || got.Blocks != 40 || got.Failed[Missing] != 40 {
		t.Fatalf("%+v, %v", got, err)
	}
}

// beforeAcquire calls a func before each Acquire.
type beforeAcquire struct {
	pool.Slots
	do func(b *pool.Batch)
}

func (s *beforeAcquire) Acquire(b *pool.Batch) {
	s.do(b)
	s.Slots.Acquire(b)
}

// TestOtherShape: a space of the same fingerprint with other sizes delivers nothing.
func TestOtherShape(t *testing.T) {
	p, d := newAgent(t, 16<<20, specOf(1, 4096)), newAgent(t, 16<<20, specOf(1, 8192))
	s, client := serve(t, p.config()), newClient(t, d.clientConfig())
	h := chain("a", 10)
	p.save(h)
	got, err := fetchAll(t, client, s.Addr().String(), d.request("", h))
	if err != nil || got.Blocks != 0 || got.Failed[Invalid] != 20 {
		t.Fatalf("%+v, %v", got, err)
	}
}

// TestDamageAtTheSender: bytes that changed at the sender since their save are not stored here.
func TestDamageAtTheSender(t *testing.T) {
	spec := specOf(2, 4096)
	p, d := newAgent(t, 16<<20, spec), newAgent(t, 16<<20, spec)
	h := chain("a", 10)
	p.save(h)
	b := p.batch(0, h.Slice(3, 4), 1)
	p.Acquire(b)
	p.arena[b.Slots[0].Off+77] ^= 1
	p.Release(b.Slots, b.Status)
	s, client := serve(t, p.config()), newClient(t, d.clientConfig())
	got, err := fetchAll(t, client, s.Addr().String(), d.request("", h))
	if err != nil || got.Blocks != 19 || got.Failed[Corrupt] != 1 {
		t.Errorf("a block was served unverified: %+v, %v", got, err)
	}
	if n := d.has(h); n != 19 {
		t.Errorf("%d blocks", n)
	}
}

// TestNoSums: a pool without checksums sends sums of what it has.
func TestNoSums(t *testing.T) {
	spec := specOf(2, 4096)
	p, d := newAgent(t, 16<<20, spec), newAgent(t, 16<<20, spec)
	h := chain("a", 10)
	p.save(h)
	cfg := p.config()
	cfg.NoSums = true
	cfg.Slots = &noSums{p}
	s, client := serve(t, cfg), newClient(t, d.clientConfig())
	got, err := fetchAll(t, client, s.Addr().String(), d.request("", h))
	if err != nil || got.Blocks != 20 || d.has(h) != 20 {
		t.Errorf("%+v, %v", got, err)
	}
}

type noSums struct{ pool.Slots }

func (s *noSums) Acquire(b *pool.Batch) {
	s.Slots.Acquire(b)
	for i := range b.Slots {
		b.Slots[i].Sum = 0
	}
}

// TestDelivered: the server hears that a transfer was delivered.
func TestDelivered(t *testing.T) {
	spec := specOf(1, 4096)
	p, d := newAgent(t, 16<<20, spec), newAgent(t, 16<<20, spec)
	s, client := serve(t, p.config()), newClient(t, d.clientConfig())
	p.mu.Lock()
	changed := p.changed
	p.mu.Unlock()
	check(t, client.Delivered(t.Context(), s.Addr().String(), spec.Fingerprint, "r"))
	<-changed
	if len(p.delivered) != 1 || p.delivered[0] != "r" {
		t.Errorf("%q", p.delivered)
	}
}

// TestCancel: a fetch that its caller ends returns without slots, and the connections go on.
func TestCancel(t *testing.T) {
	spec := specOf(1, 4096)
	p, d := newAgent(t, 16<<20, spec), newAgent(t, 16<<20, spec)
	s, client := serve(t, p.config()), newClient(t, d.clientConfig())
	h := chain("a", 20)
	p.save(h.Slice(0, 10))
	p.set("r", Open, 320)
	ctx, cancel := context.WithCancel(t.Context())
	n := 0
	got, err := fetchWith(ctx, t, client, s.Addr().String(), d.request("r", h), func(blocks int, _ int64) {
		if n += blocks; n == 20 {
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) || got.End != EndCancelled || got.Blocks != 20 || got.Failed[NotStored] != 20 {
		t.Fatalf("%+v, %v", got, err)
	}
	d.nothingLeft()
	pooltest.Until(t, "the server has read the CANCEL", func() bool { return s.Stats().Ended[EndCancelled] == 1 })
	p.save(h)
	if got, err = fetchAll(t, client, s.Addr().String(), d.request("r", h)); err != nil || got.Blocks != 20 {
		t.Fatalf("%+v, %v", got, err)
	}
	pooltest.Until(t, "the second fetch has ended, too", func() bool { return s.Stats().Ended[EndComplete] == 1 })
	check(t, errors.Join(client.Close(), s.Close()))
	if st := s.Stats(); st.Accepted != 2 {
		t.Errorf("%+v", st)
	}
}

// TestCompletedWhileItIsAskedFor: blocks that are stored before a transfer completes are announced,
// also if both happen just when its state is read.
func TestCompletedWhileItIsAskedFor(t *testing.T) {
	spec := specOf(1, 4096)
	p, d := newAgent(t, 16<<20, spec), newAgent(t, 16<<20, spec)
	h := chain("a", 10)
	cfg := p.config()
	cfg.Transfers = func(space pool.SpaceID, name string) (Transfer, <-chan struct{}) {
		p.save(h)
		p.set("r", Complete, 160)
		return p.source(space, name)
	}
	s, client := serve(t, cfg), newClient(t, d.clientConfig())
	got, err := fetchAll(t, client, s.Addr().String(), d.request("r", h.Slice(0, 10)))
	if err != nil || got.Blocks != 20 {
		t.Errorf("what was stored before the end was not announced: %+v, %v", got, err)
	}
}
