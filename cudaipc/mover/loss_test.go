package mover_test

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
	"github.com/kvagent/kvagent/cudaipc/mover"
)

// TestMoverKilledWhileCopying expects every copy to end, those that had ended to be whole, and the
// next mover to serve.
func TestMoverKilledWhileCopying(t *testing.T) {
	m := newFixture(t, nil)
	m.attach(1)
	m.attach(2)
	tickets := m.submit(1, 200)
	if d := m.done(tickets[0]); d.Err != nil {
		t.Fatal(d.Err)
	}
	pid := m.pid()
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	good, bad := 1, 0
	for _, ticket := range tickets[1:] {
		d := m.done(ticket)
		if d.Err == nil && bad > 0 {
			t.Fatal("a copy after one that was lost has ended well")
		}
		if d.Err == nil {
			good++
			continue
		}
		if bad++; !gone(pid) {
			t.Fatal("a copy ended before its mover was reaped")
		}
		for b, isBad := range d.Bad {
			if !isBad {
				t.Fatalf("block %d of a lost copy is not bad", b)
			}
		}
	}
	t.Logf("%d copies ended before the mover did, %d with it", good, bad)
	want := make([]byte, regionSize)
	devicetest.Pattern(want, 3, 0)
	if !bytes.Equal(m.arena[:regionSize], want) {
		t.Error("a copy that ended well has wrong bytes")
	}
	m.expectLost(1, cudaipc.LostCrash)
	m.told(2)
	if err := m.peer(2).Close(); err != nil {
		t.Error(err)
	}
	m.works()
}

// TestNothingEndsBeforeTheMoverIsReaped tests the fence of last resort: a copy in a stopped mover
// does not end before the mover is reaped. Otherwise a cancel would be acknowledged while its copy
// can still touch the engine's blocks.
func TestNothingEndsBeforeTheMoverIsReaped(t *testing.T) {
	for range 3 {
		m := newFixture(t, func(o *mover.Options) { o.Limits.Ping = time.Second })
		m.attach(1)
		pid := m.pid()
		devicetest.Freeze(t, pid)
		tickets := m.submit(1, 3)
		d := m.done(tickets[len(tickets)-1])
		if !gone(pid) {
			t.Fatal("a copy ended, and its mover was still there")
		}
		if d.Err == nil {
			t.Fatal("a copy of a mover that stood still ended well")
		}
		m.expectLost(1, cudaipc.LostPing)
	}
}

// TestStoppedMoverLetsGo expects a long limit for a stopped mover, but a short one while a peer's
// memory must be freed: its engine is dead, with or without a copy in flight, or its close waits.
func TestStoppedMoverLetsGo(t *testing.T) {
	for name, happens := range map[string]func(*fixture){
		"dead":             func(m *fixture) { m.engine.Kill() },
		"dead with a copy": func(m *fixture) { m.submit(1, 1); m.engine.Kill() },
		"closed":           func(m *fixture) { go func() { _ = m.peer(1).Close() }() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // they wait most of the time
			m := newFixture(t, func(o *mover.Options) {
				o.Limits.Ping, o.Limits.Quiet, o.Limits.Copy, o.Limits.Close = time.Hour, 300*time.Millisecond,
					time.Hour, time.Hour
			})
			m.attach(1)
			m.attach(2)
			pid := m.pid()
			devicetest.Freeze(t, pid)
			happens(m)
			m.told(2)
			if lost := m.mover.Movers()[0].Lost; !gone(pid) || lost[cudaipc.LostPing] != 1 {
				t.Errorf("lost %v, the mover is gone: %v", lost, gone(pid))
			}
		})
	}
}

// TestStoppedMoverIsWaitedFor while no peer is to be closed.
func TestStoppedMoverIsWaitedFor(t *testing.T) {
	const quiet = 100 * time.Millisecond
	m := newFixture(t, func(o *mover.Options) { o.Limits.Ping, o.Limits.Quiet = time.Hour, quiet })
	m.attach(1)
	pid := m.pid()
	devicetest.Freeze(t, pid)
	devicetest.Until(t, "the mover is silent for longer than the short limit", func() bool {
		return m.mover.Movers()[0].PingAgeMS > (5 * quiet).Milliseconds()
	})
	if gone(pid) {
		t.Fatal("a mover that stood still was not waited for, though no peer was to be let go")
	}
	if err := unix.Kill(pid, unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if d := m.done(m.submit(1, 1)[0]); d.Err != nil {
		t.Error(d.Err)
	}
	if err := m.peer(1).Close(); err != nil {
		t.Error(err)
	}
}

// TestDeviceIsLostUnseen expects a device that is lost while nothing calls it to cost the mover.
func TestDeviceIsLostUnseen(t *testing.T) {
	t.Parallel()
	m := newFixture(t, func(o *mover.Options) { o.Device = lostUnseen })
	m.attach(1)
	m.done(m.submit(1, 1)[0])
	m.told(1)
	m.expectLost(1, cudaipc.LostDevice)
}

// TestCopyHangsBesideOthers expects a copy that does not end to cost the mover also while those of
// another peer do.
func TestCopyHangsBesideOthers(t *testing.T) {
	t.Parallel()
	m := newFixture(t, func(o *mover.Options) { o.Device, o.Limits.Copy = hangsForTwo, time.Second })
	m.attach(1)
	m.attach(2)
	hangs := m.submit(2, 1)[0]
	for begin := time.Now(); ; {
		ticket, err := m.copy(1)
		if errors.Is(err, cudaipc.ErrPeer) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if m.done(ticket).Err != nil {
			break
		}
		if time.Since(begin) > testTimeout {
			t.Fatalf("a copy hangs, and others have ended for %v", testTimeout)
		}
	}
	if d := m.done(hangs); d.Err == nil {
		t.Error("a copy that hung ended well")
	}
	m.expectLost(2, cudaipc.LostCopy)
}

// TestSlowListenerCostsNothing expects a mover to serve while the function that it informs waits,
// as for a log that nobody reads.
func TestSlowListenerCostsNothing(t *testing.T) {
	t.Parallel()
	waits, read := make(chan struct{}, 100), make(chan struct{})
	m := newFixture(t, func(o *mover.Options) {
		o.Device, o.Limits.Ping = lostUnseen, 2*time.Second
		o.Informed = func(cudaipc.CUDAInfo) {
			waits <- struct{}{}
			<-read
		}
	})
	defer close(read)
	m.attach(1)
	<-waits
	m.attach(2)
	for id := range 2 {
		if err := m.peer(id + 1).Close(); err != nil {
			t.Error(err)
		}
	}
	if lost := m.mover.Movers()[0].Lost[cudaipc.LostPing]; lost != 0 {
		t.Errorf("%d movers were lost", lost)
	}
}

// TestMoverHangs expects a device call that does not return to cost only the mover, within its
// limit.
func TestMoverHangs(t *testing.T) {
	t.Run("Copy", func(t *testing.T) { testHangingCopy(t, hangsInCopy, cudaipc.LostCopy) })
	t.Run("Done", func(t *testing.T) { testHangingCopy(t, hangsInDone, cudaipc.LostCopy) })
	t.Run("Sum", testHangingSum)
	t.Run("ErrLost", func(t *testing.T) { testHangingCopy(t, losesItself, cudaipc.LostDevice) })
	t.Run("Import", func(t *testing.T) {
		t.Parallel()
		m := newFixture(t, func(o *mover.Options) { o.Device, o.Limits.Import = hangsInImport, time.Second })
		var lost *cudaipc.LostError
		if err := m.imported(1, m.imports(1)); !errors.As(err, &lost) || lost.Reason != cudaipc.LostCall {
			t.Errorf("Import: %v, want the loss of the mover by its limit", err)
		}
	})
	t.Run("Close", func(t *testing.T) {
		t.Parallel()
		m := newFixture(t, func(o *mover.Options) { o.Device, o.Limits.Close = hangsInClose, time.Second })
		m.attach(1)
		m.attach(2)
		pid := m.pid()
		if err := m.peer(1).Close(); err != nil || !gone(pid) {
			t.Errorf("Close: %v, the mover is gone: %v", err, gone(pid))
		}
		m.expectLost(2, cudaipc.LostCall)
		if m.mu.Lock(); len(m.lost[1]) > 0 { // its session may have another peer by now
			t.Error("the loss of a peer was told that was being closed")
		}
		m.mu.Unlock()
	})
	t.Run("Open", func(t *testing.T) {
		t.Parallel()
		m := newFixture(t, func(o *mover.Options) { o.Device, o.Limits.Start = hangsInOpen, 5*time.Second })
		imported := make(chan error)
		go func() { imported <- m.imported(1, m.imports(1)) }()
		devicetest.Until(t, "a process is being started", func() bool { return m.mover.Movers()[0].PID > 0 })
		begin := time.Now()
		if err := m.mover.Close(); !errors.Is(err, cudaipc.ErrBusy) || time.Since(begin) > time.Second {
			t.Errorf("Close during an import: %v after %v, want ErrBusy at once", err, time.Since(begin))
		}
		if err := <-imported; err == nil {
			t.Error("a device that does not open has imported")
		}
	})
	t.Run("Poll", func(t *testing.T) {
		t.Parallel()
		m := newFixture(t, func(o *mover.Options) {
			o.Device, o.AskEvents, o.Limits.Poll = hangsInPoll, true, time.Second
		})
		m.attach(1)
		if _, err := m.peer(1).Poll(cudaipc.Wait{Event: 0, Revoke: 0}); !errors.Is(err, cudaipc.ErrPeer) {
			t.Errorf("Poll: %v, want ErrPeer", err)
		}
		m.expectLost(1, cudaipc.LostCall)
	})
}

// testHangingSum: a sum does not end before the process is reaped, since it may read the peer's
// memory until then.
func testHangingSum(t *testing.T) {
	t.Parallel()
	m := newFixture(t, func(o *mover.Options) { o.Device, o.Limits.Copy = hangsInSum, time.Second })
	m.attach(1)
	pid := m.pid()
	ticket, err := m.peer(1).Sum(&cudaipc.Sample{
		Within: time.Millisecond, Pieces: []cudaipc.Piece{{Region: 1, Bytes: 4096}},
		Blocks: []cudaipc.SampleBlock{{}, {}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.peer(1).Close(); !errors.Is(err, cudaipc.ErrBusy) {
		t.Errorf("Close while the peer is summed: %v, want ErrBusy", err)
	}
	if d := m.done(ticket); d.Err == nil || len(d.Bad) != 2 || !d.Bad[0] || !d.Bad[1] || !gone(pid) {
		t.Errorf("bad blocks %v, %v, the mover is gone: %v; want all bad, when it is gone", d.Bad, d.Err, gone(pid))
	}
	m.expectLost(1, cudaipc.LostCopy)
}

func testHangingCopy(t *testing.T, fault string, reason cudaipc.LossReason) {
	t.Parallel() // they wait most of the time
	m := newFixture(t, func(o *mover.Options) { o.Device, o.Limits.Copy = fault, time.Second })
	m.attach(1)
	pid := m.pid()
	for _, ticket := range m.submit(1, 3) {
		if d := m.done(ticket); d.Err == nil || !gone(pid) {
			t.Errorf("a copy ended with %v, the mover is gone: %v", d.Err, gone(pid))
		}
	}
	m.expectLost(1, reason)
}

// TestMoverBacksOff expects a pause before the third start of a mover that failed to start twice.
func TestMoverBacksOff(t *testing.T) {
	m := newFixture(t, func(o *mover.Options) {
		o.Device, o.Limits.Steady, o.Limits.Again, o.Limits.AtMost = doesNotOpen, time.Hour, time.Hour, time.Hour
	})
	for try := range 3 {
		err := m.imported(1, m.imports(1))
		if !errors.Is(err, cudaipc.ErrNoCUDA) {
			t.Fatalf("%d: %v, want the device's own error", try, err)
		}
	}
	s := m.mover.Movers()[0]
	if s.Starts != 2 || s.Lost[cudaipc.LostStart] != 2 || s.PID != 0 || s.NextStartMS < time.Minute.Milliseconds() {
		t.Errorf("%+v, want two starts and a pause", s)
	}
}

// TestDefaultLimitsFreeMemoryInTime expects that a mover that is stopped, and a driver that does
// not return from a close, are noticed early enough to kill the mover and free a dead engine's
// memory within 2 s.
func TestDefaultLimitsFreeMemoryInTime(t *testing.T) {
	const within, kill = 2 * time.Second, 250 * time.Millisecond // kill: and reap
	l := mover.DefaultLimits
	for name, limit := range map[string]time.Duration{"Quiet": l.Quiet, "Close": l.Close} {
		if limit+l.Tick+kill > within {
			t.Errorf("%s is %v, looked after every %v: beyond %v", name, limit, l.Tick, within)
		}
	}
}
