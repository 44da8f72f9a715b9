package transfer

import (
	"testing"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
	"github.com/kvagent/kvagent/cudaipc/mover"
	"github.com/kvagent/kvagent/pool"
)

// TestSaveWaitsForItsEvent submits a save while the kernel that computes its block still runs.
func TestSaveWaitsForItsEvent(t *testing.T) {
	s := newNode(t, 64).join(t, nil)
	s.write(3, 1)
	letGo := s.hold(func() { s.write(3, 2) })
	s.stream.SetStep(5)
	s.stream.Record(0)
	job := save(1, section(0, 1, 3))
	job.Step, job.Event = 5, 0
	s.submit(job)
	s.reaches(Save, WaitingEvent, "the save did not wait for its event")
	if used := s.pool.Stats(); used.Used != 0 {
		t.Errorf("%d bytes of the pool are held while the save waits", used.Used)
	}
	letGo()
	s.ends(1, pool.OK)
	s.finish(load(2, section(0, 1, 9)), pool.OK)
	s.expect(9, 2, "bytes from before the event were stored")
}

// TestSaveWaitsForTheEventBehindTheStep expects a save not to begin at the step word alone.
func TestSaveWaitsForTheEventBehindTheStep(t *testing.T) {
	s := newNode(t, 64).join(t, nil)
	s.stream.SetStep(5)
	letGo := s.hold(func() { s.write(3, 2) })
	s.stream.Record(0)
	job := save(1, section(0, 1, 3))
	job.Step, job.Event = 5, 0
	s.submit(job)
	s.reaches(Save, WaitingEvent, "the save did not wait for its event")
	letGo()
	s.ends(1, pool.OK)
	s.finish(load(2, section(0, 1, 9)), pool.OK)
	s.expect(9, 2, "bytes from before the event were stored")
}

// firesForTheDead is a peer of which all events have fired, as on a driver where those of a dead
// process fire.
type firesForTheDead struct{ cudaipc.Peer }

func (p firesForTheDead) Poll(w cudaipc.Wait) (cudaipc.State, error) {
	s, err := p.Peer.Poll(w)
	s.Fired = true
	return s, err
}

// TestNothingUnfinishedIsStored kills an engine in the middle of a step, on a device where its
// events then fire.
func TestNothingUnfinishedIsStored(t *testing.T) {
	n := newNode(t, 64)
	engine := devicetest.HostEngine(t, devicetest.Spec{Regions: []int64{blocks * blockSize}, Events: 1}, cudaipc.KindFD)
	im, err := engine.Import()
	if err != nil {
		t.Fatal(err)
	}
	peer := firesForTheDead{devicetest.Import(t, n.host, im)}
	sp := spec(1)
	space, err := n.pool.OpenSpace(sp)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan Completion, 1)
	limits := DefaultLimits
	limits.EventWait = 200 * time.Millisecond
	w, err := Start(Config{
		Peer: peer, Slots: n.pool, Space: space, Spec: sp, Limits: limits, Lanes: n.lanes,
		Held: []Held{{Layout: Layout{[]GroupLayout{{NumBlocks: blocks,
			Segments: []Segment{{Region: 1, Stride: blockSize, Bytes: blockSize}}}}}}},
		Complete: func(c Completion) { done <- c },
	})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	for _, op := range []devicetest.Op{
		{Kind: devicetest.SetStep, Step: 6}, {Kind: devicetest.Synchronize}, {Kind: devicetest.Hold},
		{Kind: devicetest.LaunchFill, Region: 1, Len: blockSize, Seed: 1},
		{Kind: devicetest.SetStep, Step: 7}, {Kind: devicetest.Record},
	} {
		if _, err := engine.Do(op); err != nil {
			t.Fatal(err)
		}
	}
	job := save(1, section(0, 1, 0))
	job.Step, job.Event = 7, 0
	if err := w.Submit(job); err != nil {
		t.Fatal(err)
	}
	engine.Kill()
	c := <-done
	if c.Status[0] == pool.OK || n.pool.Prefix(space, 0, pool.Chain(chain(0, 1), hashLen)) != 0 {
		t.Fatalf("a block of a step that never ended was stored, on an event that fired because its process died "+
			"(status %d)", c.Status[0])
	}
	if c.Status[0] != TimedOut {
		t.Errorf("status %d, want timed out", c.Status[0])
	}
}

// TestLoadWaitsForTheStepInFlight loads a block while a kernel of the step in flight still writes
// to it.
func TestLoadWaitsForTheStepInFlight(t *testing.T) { loadWaits(t, newNode(t, 64)) }

// TestLoadWaitsForTheStepInFlightBehindAMover, which is asked for the event, as a GPU's is.
func TestLoadWaitsForTheStepInFlightBehindAMover(t *testing.T) {
	loadWaits(t, newNodeOn(t, 64, func(fd int, size int64) (cudaipc.Device, error) {
		return mover.New(mover.Options{
			Name: "test", Device: cudaipc.HostDevice, ArenaFD: fd, ArenaSize: size, AskEvents: true,
			Command: devicetest.MoverCommand, Env: devicetest.MoverEnv, Node: -1,
		})
	}))
}

func loadWaits(t *testing.T, n *node) {
	t.Helper()
	s := n.join(t, nil)
	s.write(3, 1)
	s.finish(save(1, section(0, 1, 3)), pool.OK)
	letGo := s.hold(func() { s.write(8, 99) })
	s.stream.SetStep(5)
	s.stream.Record(0)
	job := load(2, section(0, 1, 8))
	job.Step, job.Event = 5, 0
	s.submit(job)
	s.reaches(Load, WaitingEvent, "the load did not wait for the step in flight")
	letGo()
	s.ends(2, pool.OK)
	s.stream.Synchronize()
	s.expect(8, 1, "the step in flight wrote over what was loaded")
}

// TestCompletionComesBehindTheCopy expects no job of either kind to be done while its copy is in
// flight.
func TestCompletionComesBehindTheCopy(t *testing.T) {
	for _, kind := range []Kind{Save, Load} {
		n := newNode(t, 64)
		g := newGate()
		s := n.join(t, g.before)
		s.write(3, 1)
		job := save(1, section(0, 1, 3))
		if kind == Load {
			n.join(t, nil).fill(0, 1)
			job = load(1, section(0, 1, 8))
		}
		s.submit(job)
		g.during(s, "completion before the copy has ended", func() {})
		g.open()
		s.ends(1, pool.OK)
	}
}

// fill stores blocks of a chain with the patterns of seeds 1000, 1001, ...
func (s *station) fill(from, n int) {
	s.t.Helper()
	for i := range n {
		s.write(uint32(i), uint64(1000+from+i))
	}
	s.finish(save(77, section(from, n, 0)), pool.OK)
}

// TestChecksumIsBoundToTheKey exchanges two slots with their sums, so that each block is whole, and
// wrong.
func TestChecksumIsBoundToTheKey(t *testing.T) {
	n := newNode(t, 64)
	n.join(t, nil).fill(0, 2)
	s := n.join(t, func(c *Config) { c.Slots = mixedUp{n.pool} })
	s.submit(load(1, section(0, 2, 8)))
	for i, status := range s.completion().Status {
		if status != pool.Corrupt {
			t.Errorf("block %d has the bytes of another key and status %d, want corrupt: the checksum is not bound "+
				"to the key", i, status)
		}
	}
	if s.stored(0, 2) != 0 {
		t.Error("corrupt entries are stored still")
	}
}

// TestCancelIsAFence expects the acknowledgement of a cancel to come after the copies in flight
// have ended, and no copy to begin after it.
func TestCancelIsAFence(t *testing.T) {
	for _, batches := range []int{1, 3} {
		for _, kind := range []Kind{Save, Load} {
			cancelWhileCopying(t, kind, batches)
		}
	}
}

func cancelWhileCopying(t *testing.T, kind Kind, batches int) {
	n := newNode(t, 64)
	n.lanes = NewLanes(8, DefaultLimits.SaveAge, nil)
	n.join(t, nil).fill(0, 8)
	g := newGate()
	s := n.join(t, func(c *Config) {
		g.before(c)
		c.Limits = DefaultLimits
		c.Limits.BatchBytes, c.Limits.Batches = 2*blockSize, batches
	})
	job := save(1, section(100, 8, 0))
	if kind == Load {
		job = load(1, section(0, 8, 0))
	}
	s.submit(job)
	for range batches - 1 {
		<-g.submitted
	}
	g.during(s, "cancel is no fence", func() {
		if !s.worker.Cancel(1) {
			t.Fatal("the job is not known")
		}
	})
	g.open()
	c := s.completion()
	for i, status := range c.Status[2*batches:] {
		if status != Cancelled {
			t.Errorf("kind %d, block %d: status %d, want cancelled", kind, 2*batches+i, status)
		}
	}
	if s.worker.Cancel(1) {
		t.Error("a job that was completed is known still")
	}
	if kind == Save && s.stored(100, 8) != 0 {
		t.Error("a cancelled save stored blocks")
	}
}

// TestNextBatchesAreUnderWay expects the device to have as many batches as are allowed, before the
// first of them has ended, and their blocks to be whole, and in their places.
func TestNextBatchesAreUnderWay(t *testing.T) {
	n := newNode(t, 64)
	n.lanes = NewLanes(8, DefaultLimits.SaveAge, nil)
	limits := DefaultLimits
	limits.BatchBytes, limits.Batches = 2*blockSize, 3
	for _, job := range []Job{save(1, section(0, 10, 0)), load(2, section(0, 10, 20))} {
		g := newGate()
		s := n.join(t, func(c *Config) { g.before(c); c.Limits = limits })
		for b := range uint32(10) {
			s.write(b, 1000+uint64(b))
		}
		s.submit(job)
		g.takes(s, limits.Batches)
		g.open()
		s.ends(job.ID, pool.OK)
		for b := range uint32(10) {
			if job.Kind == Load {
				s.expect(20+b, 1000+uint64(b), "a load in batches")
			}
		}
	}
	if free := n.lanes.mu.free; free != 8 {
		t.Errorf("%d lanes are free at the end, want 8", free)
	}
}

// TestOneLaneOneBatch expects batches after the first to begin only while a lane is free.
func TestOneLaneOneBatch(t *testing.T) {
	n := newNode(t, 64)
	n.lanes = NewLanes(1, DefaultLimits.SaveAge, nil)
	g := newGate()
	s := n.join(t, func(c *Config) { g.before(c); c.Limits = DefaultLimits; c.Limits.BatchBytes = blockSize })
	s.submit(save(1, section(0, 6, 0)))
	g.takes(s, 1)
	g.open()
	s.ends(1, pool.OK)
}

// TestRevokedWithBatchesUnderWay expects nothing of a revoked save's batches to be stored, neither
// of the first nor of the last, and no batch to begin after them.
func TestRevokedWithBatchesUnderWay(t *testing.T) {
	n := newNode(t, 64)
	n.lanes = NewLanes(8, DefaultLimits.SaveAge, nil)
	g := newGate()
	limits := DefaultLimits
	limits.BatchBytes, limits.Batches = blockSize, 6
	s := n.join(t, func(c *Config) { g.before(c); c.Limits = limits })
	job := save(1, section(0, 8, 0))
	job.Revoke = 7
	s.submit(job)
	g.takes(s, limits.Batches)
	s.engine.Revoke(7)
	g.open()
	s.ends(1, Revoked)
	if used := s.pool.Stats().Used; used != 0 || s.stored(0, 8) != 0 {
		t.Errorf("%d blocks are stored, %d bytes held, want nothing of a revoked save", s.stored(0, 8), used)
	}
}

// TestRevokedIsNotStored revokes a save while it is copied, and overwrites its block.
func TestRevokedIsNotStored(t *testing.T) {
	n := newNode(t, 64)
	g := newGate()
	s := n.join(t, g.before)
	s.write(3, 1)
	job := save(1, section(0, 1, 3))
	job.Revoke = 7
	s.submit(job)
	g.during(s, "a revoked save", func() {
		s.engine.Revoke(7)
		s.write(3, 2)
	})
	g.open()
	c := s.completion()
	if c.Status[0] != Revoked || s.stored(0, 1) != 0 {
		t.Fatalf("the save was revoked before its commit: status %d, want revoked; %d blocks stored, want 0",
			c.Status[0], s.stored(0, 1))
	}
	if used := s.pool.Stats().Used; used != 0 {
		t.Errorf("%d bytes of the pool are held after a revoked save", used)
	}
}

// clearing is a peer that clears its revocation word when the second copy is asked for.
type clearing struct {
	*gate
	copies int
	clear  func()
}

func (c *clearing) Copy(x *cudaipc.Copy) (cudaipc.Ticket, error) {
	c.copies++
	first := c.copies == 1
	ticket, err := c.gate.Copy(x)
	return func(timeout time.Duration) (cudaipc.Done, bool, error) {
		if !first {
			c.clear()
		}
		return ticket(timeout)
	}, err
}

// TestRevocationIsNotTakenBack revokes a save, and uses the word for something else while the later
// batches end. It expects them to be dropped all the same: the engine may have used their blocks
// since.
func TestRevocationIsNotTakenBack(t *testing.T) {
	n := newNode(t, 64)
	n.lanes = NewLanes(8, DefaultLimits.SaveAge, nil)
	c := &clearing{gate: newGate()}
	limits := DefaultLimits
	limits.BatchBytes, limits.Batches = blockSize, 6
	s := n.join(t, func(cfg *Config) { c.Peer, cfg.Peer, cfg.Limits = cfg.Peer, c, limits })
	c.clear = func() { s.engine.ClearRevoke(7) }
	job := save(1, section(0, 8, 0))
	job.Revoke = 7
	s.submit(job)
	c.takes(s, limits.Batches)
	s.engine.Revoke(7)
	c.open()
	for i, status := range s.completion().Status {
		if status != Revoked {
			t.Errorf("block %d has status %d: a batch of a revoked save was stored", i, status)
		}
	}
}

// TestEpochIsCheckedAtCommit resets the space while a save is copied.
func TestEpochIsCheckedAtCommit(t *testing.T) {
	n := newNode(t, 64)
	g := newGate()
	s := n.join(t, g.before)
	s.submit(save(1, section(0, 4, 3)))
	g.during(s, "a save of an epoch that is over", func() {
		if _, err := s.pool.ResetSpace(s.space); err != nil {
			t.Fatal(err)
		}
	})
	g.open()
	c := s.completion()
	if c.Status[0] != pool.Stale || s.stored(0, 4) != 0 {
		t.Fatalf("the epoch ended before the commit: status %d, want stale; %d blocks stored, want 0", c.Status[0],
			s.stored(0, 4))
	}
}

// TestEpochEndsWhileASaveWaits resets the space between submission and event.
func TestEpochEndsWhileASaveWaits(t *testing.T) {
	s := newNode(t, 64).join(t, nil)
	letGo := s.hold(func() {})
	s.stream.Record(0)
	job := save(1, section(0, 4, 3))
	job.Event = 0
	s.submit(job)
	s.reaches(Save, WaitingEvent, "the save did not wait for its event")
	if _, err := s.pool.ResetSpace(s.space); err != nil {
		t.Fatal(err)
	}
	letGo()
	c := s.completion()
	if c.Status[0] != pool.Stale || s.stored(0, 4) != 0 {
		t.Fatalf("the epoch ended while the save waited: status %d, want stale; %d blocks stored, want 0", c.Status[0],
			s.stored(0, 4))
	}
}
