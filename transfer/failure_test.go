package transfer

import (
	"testing"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

// TestCorruptIsDropped flips one bit in the pool. Without content checksums it is not detected.
func TestCorruptIsDropped(t *testing.T) {
	for _, integrity := range []Integrity{Full, Header} {
		s := newNode(t, 64).join(t, func(c *Config) { c.Integrity = integrity })
		s.fill(0, 3)
		arena, _ := s.pool.Arena()
		b := pool.Batch{Space: s.space, Hashes: pool.Chain(chain(1, 1), hashLen), Status: make([]pool.Status, 1),
			Slots: make([]pool.Slot, 1)}
		s.pool.Acquire(&b)
		arena[b.Slots[0].Off+blockSize-1] ^= 4
		s.pool.Release(b.Slots, b.Status)
		s.submit(load(1, section(0, 3, 8)))
		c := s.completion()
		want := pool.Corrupt
		if integrity == Header {
			want = pool.OK
		}
		if c.Status[0] != pool.OK || c.Status[1] != want || c.Status[2] != pool.OK {
			t.Errorf("integrity %d: statuses %v, want %d for the second", integrity, c.Status, want)
		}
		s.expect(8, 1000, "the first block")
		if integrity == Full {
			s.finish(load(2, section(1, 1, 8)), pool.Missing)
		}
	}
}

func TestFullPoolIsBusy(t *testing.T) {
	s := newNode(t, 4).join(t, nil)
	s.fill(0, 4)
	b := pool.Batch{Space: s.space, Hashes: pool.Chain(chain(0, 4), hashLen), Status: make([]pool.Status, 4),
		Slots: make([]pool.Slot, 4)}
	s.pool.Acquire(&b)
	s.finish(save(1, section(50, 2, 0)), pool.Busy)
	s.pool.Release(b.Slots, b.Status)
	s.finish(save(2, section(50, 2, 0)), pool.OK)
}

// TestStaleJobs expects a job of an epoch that is over to touch nothing.
func TestStaleJobs(t *testing.T) {
	s := newNode(t, 64).join(t, nil)
	s.fill(0, 2)
	if _, err := s.pool.ResetSpace(s.space); err != nil {
		t.Fatal(err)
	}
	s.write(8, 5)
	s.finish(load(1, section(0, 2, 8)), pool.Stale)
	s.expect(8, 5, "a stale load")
	s.finish(save(2, section(0, 2, 8)), pool.Stale)
	job := load(3, section(0, 2, 8))
	job.Epoch = 2
	s.finish(job, pool.Missing)
}

// broken is a peer that fails in one way.
type broken struct {
	cudaipc.Peer
	copy, done, poll error
	bad              bool
}

func (b *broken) Copy(c *cudaipc.Copy) (cudaipc.Ticket, error) {
	if b.copy != nil {
		return nil, b.copy
	}
	ticket, err := b.Peer.Copy(c)
	return func(timeout time.Duration) (cudaipc.Done, bool, error) {
		d, ok, err := ticket(timeout)
		if ok && b.bad {
			d.Bad = make([]bool, max(len(d.Sums), 2))
			d.Bad[1] = true
		}
		if ok && b.done != nil {
			return cudaipc.Done{}, false, b.done
		}
		return d, ok, err
	}, err
}

func (b *broken) Poll(w cudaipc.Wait) (cudaipc.State, error) {
	if b.poll != nil {
		return cudaipc.State{}, b.poll
	}
	return b.Peer.Poll(w)
}

// TestDeviceThatFails expects every block to get a status, nothing to stay reserved or pinned, and
// the worker to continue.
func TestDeviceThatFails(t *testing.T) {
	for name, b := range map[string]*broken{
		"copy": {copy: cudaipc.ErrPeer}, "done": {done: cudaipc.ErrPeer}, "poll": {poll: cudaipc.ErrPeer},
		"bad": {bad: true},
	} {
		n := newNode(t, 64)
		n.join(t, nil).fill(0, 2)
		s := n.join(t, func(c *Config) { b.Peer, c.Peer = c.Peer, b })
		used := n.pool.Stats().Used
		for id, job := range []Job{save(0, section(20, 2, 0)), load(1, section(0, 2, 8))} {
			s.submit(job)
			c := s.completion()
			if c.Status[1] != Failed || (name != "bad" && c.Status[0] != Failed) {
				t.Errorf("%s, job %d: statuses %v, want failed", name, id, c.Status)
			}
			if name == "bad" && c.Status[0] != pool.OK {
				t.Errorf("%s, job %d: the good block has status %d", name, id, c.Status[0])
			}
		}
		if name != "bad" && n.pool.Stats().Used != used {
			t.Errorf("%s: %d bytes stay reserved", name, n.pool.Stats().Used-used)
		}
		*b = broken{Peer: b.Peer}
		s.finish(load(3, section(0, 2, 8)), pool.OK)
	}
}

// TestPeerThatWasClosed sends jobs for a peer that the device has closed.
func TestPeerThatWasClosed(t *testing.T) {
	s := newNode(t, 64).join(t, nil)
	if err := s.peer.Close(); err != nil {
		t.Fatal(err)
	}
	s.finish(save(1, section(0, 2, 0)), Failed)
	s.finish(load(2, section(0, 2, 0)), Failed)
}

// TestRegionsThatAreTooSmall expects a layout that reaches beyond the imported regions to fail
// block by block.
func TestRegionsThatAreTooSmall(t *testing.T) {
	s := newNode(t, 64).join(t, func(c *Config) { c.Held[0].Layout.Groups[0].NumBlocks = 1 << 20 })
	s.finish(save(1, section(0, 2, 1<<19)), Failed)
	s.finish(save(2, section(0, 2, 0)), pool.OK)
}

// TestBatchesAreBounded counts the blocks of each copy.
func TestBatchesAreBounded(t *testing.T) {
	n := newNode(t, 64)
	count := &counting{}
	s := n.join(t, func(c *Config) {
		count.Peer, c.Peer, c.Limits = c.Peer, count, DefaultLimits
		c.Limits.BatchBytes = 3*blockSize + 1
	})
	s.finish(save(1, section(0, 5, 0), section(10, 5, 10)), pool.OK)
	for i, blocks := range count.blocks {
		if want := min(3, 10-3*i); blocks != want {
			t.Errorf("copy %d has %d blocks, want %d", i, blocks, want)
		}
	}
	if len(count.blocks) != 4 || count.runs != 20 {
		t.Errorf("%d copies with %d runs, want 4 with 20: two neighbours are one run", len(count.blocks), count.runs)
	}
}

// TestBatchesOfSmallPiecesAreBounded expects a layout of as many pieces as are allowed to be
// copied, in copies that a device takes.
func TestBatchesOfSmallPiecesAreBounded(t *testing.T) {
	n := newNode(t, 64)
	count := &counting{}
	s := n.join(t, func(c *Config) {
		count.Peer, c.Peer = c.Peer, count
		c.Spec.Fingerprint[5], c.Spec.Groups[0].ShardBytes = 1, []uint32{ipc.MaxSegments}
		g := GroupLayout{NumBlocks: 32}
		for i := range uint64(ipc.MaxSegments) {
			g.Segments = append(g.Segments, Segment{Offset: ipc.MaxSegments - 1 - i, Stride: ipc.MaxSegments, Bytes: 1})
		}
		c.Held[0].Layout.Groups[0] = g
	})
	s.finish(save(1, section(0, 5, 0), section(10, 5, 5)), pool.OK)
	if want := 10 * ipc.MaxSegments; count.runs != want || len(count.blocks) < want/maxBatchRuns {
		t.Errorf("%d copies with %d runs, want %d in copies of at most %d", len(count.blocks), count.runs, want,
			maxBatchRuns)
	}
	s.finish(load(2, section(0, 5, 20)), pool.OK)
}

type counting struct {
	cudaipc.Peer
	blocks []int
	runs   int
}

func (c *counting) Copy(x *cudaipc.Copy) (cudaipc.Ticket, error) {
	c.blocks = append(c.blocks, len(x.Blocks))
	c.runs += len(x.Runs)
	return c.Peer.Copy(x)
}

// TestLongSaveKeepsItsOwnPrefix saves a chain longer than the pool, in several batches. Blocks
// without room end the section; those after them, which could not be found, do not evict its
// beginning.
func TestLongSaveKeepsItsOwnPrefix(t *testing.T) {
	s := newNode(t, 8).join(t, func(c *Config) {
		c.Limits = DefaultLimits
		c.Limits.BatchBytes = 4 * blockSize
	})
	s.submit(save(1, section(0, 24, 0)))
	c := s.completion()
	for i, status := range c.Status {
		if want := map[bool]pool.Status{true: pool.OK, false: pool.Busy}[i < 8]; status != want {
			t.Errorf("block %d of the chain: status %d, want %d", i, status, want)
		}
	}
	if n := s.stored(0, 24); n != 8 {
		t.Errorf("%d blocks of the prefix are stored, want 8: a long save pushed out its own prefix", n)
	}
}
