//go:build cuda

package mover_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
)

// loadSize is one call of the driver.
const loadSize = 1 << 20

// loader is a mover whose copies are held, and an engine that waits for its load events.
type loader struct {
	*fixture
	held heldCopies
}

func newLoader(t *testing.T, count uint32) *loader {
	t.Helper()
	held, env := holdCopies(t)
	m := newCUDAFixture(t, faultEngine(t), longLimits, env)
	l := &loader{m, held}
	m.attach(1)
	m.pinned()
	handles, err := m.mover.LoadEvents(1, l.words(), count)
	if err != nil || len(handles) != int(count)*cudaipc.CUDAEventCell {
		t.Fatalf("%d bytes of handles, %v", len(handles), err)
	}
	l.do(devicetest.Op{Kind: devicetest.OpenLoads, Data: handles})
	copy(m.arena, pattern(3, loadSize))
	held.hold()
	return l
}

func (l *loader) do(op devicetest.Op) []byte {
	l.t.Helper()
	data, err := l.engine.Do(op)
	if err != nil {
		l.t.Fatal(err)
	}
	return data
}

func (l *loader) words() uint64 {
	return binary.LittleEndian.Uint64(l.do(devicetest.Op{Kind: devicetest.LoadWords}))
}

// load starts a load into region 2.
func (l *loader) load(serial uint64) cudaipc.Ticket {
	l.t.Helper()
	ticket, err := l.mover.Copy(&cudaipc.Copy{
		Peer: 1, Dir: cudaipc.Scatter, Sum: true, Serial: serial, Blocks: []cudaipc.Block{{Runs: 1}},
		Runs: []cudaipc.Run{{Region: 2, Len: loadSize}},
	})
	if err != nil {
		l.t.Fatal(err)
	}
	return ticket
}

func (l *loader) waits(serial uint64) bool {
	l.t.Helper()
	return l.do(devicetest.Op{Kind: devicetest.WaitLoad, Step: serial})[0] == 1
}

// untilWaits has the engine's stream wait for a load as soon as its event is recorded.
func (l *loader) untilWaits(serial uint64) {
	l.t.Helper()
	devicetest.Until(l.t, fmt.Sprintf("load %d is recorded", serial), func() bool { return l.waits(serial) })
}

// seen returns what a kernel after the stream's waits so far sees in region 2. then is called when
// it is launched.
func (l *loader) seen(then func()) []byte {
	l.t.Helper()
	l.do(devicetest.Op{Kind: devicetest.LaunchCopy, Region: 2, Index: 1, Len: loadSize})
	then()
	l.do(devicetest.Op{Kind: devicetest.Synchronize})
	return l.do(devicetest.Op{Kind: devicetest.Read, Region: 1, Len: loadSize})
}

// TestCUDAStreamWaitsForALoad expects a kernel of the engine to see all bytes of the load after the
// wait, without a wait of its processor, and not to see them without it.
func TestCUDAStreamWaitsForALoad(t *testing.T) {
	ownMachine(t)
	for _, wait := range []bool{true, false} {
		l := newLoader(t, 2)
		if l.waits(7) || l.waits(9) {
			t.Fatal("a load that was not submitted is said to be recorded")
		}
		ticket, letGo := l.load(7), func() {}
		if wait {
			l.untilWaits(7)
			letGo = l.held.letGo
		}
		if got := bytes.Equal(l.seen(letGo), pattern(3, loadSize)); got != wait {
			t.Errorf("waited %v: the kernel sees the load's bytes: %v", wait, got)
		}
		if !wait {
			l.held.letGo()
		}
		if d := l.done(ticket); d.Err != nil {
			t.Errorf("the load: %v", d.Err)
		}
		if l.waits(9) {
			t.Error("another load of the same word is said to be recorded")
		}
	}
}

// TestCUDALoadEventsOfADeadMover kills the mover while a stream waits for a load. In one ending of
// the driver the stream continues, with unverified bytes; in the other it stays, and the engine's
// own deadline ends it. It expects a failed load in both.
func TestCUDALoadEventsOfADeadMover(t *testing.T) {
	for _, ending := range []string{"fire", "never"} {
		t.Run(ending, func(t *testing.T) {
			ownMachine(t)
			t.Setenv("SOFTCUDA_EVENTS_ON_DEATH", ending)
			l := newLoader(t, 1)
			ticket := l.load(5)
			l.untilWaits(5)
			if err := unix.Kill(l.pid(), unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
			if d := l.done(ticket); d.Err == nil {
				t.Error("the load of a dead mover says that it arrived")
			}
			through := make(chan error, 1)
			go func() {
				_, err := l.engine.Do(devicetest.Op{Kind: devicetest.Synchronize})
				through <- err
			}()
			if ending == "never" {
				// The driver has taken back what the dead mover held when it serves another engine
				// and mover, from their start to their end.
				newCUDAFixture(t, faultEngine(t), longLimits).works()
				select {
				case err := <-through:
					t.Errorf("the stream went on: %v", err)
				default:
					l.engine.Kill()
					<-through
				}
				return
			}
			select {
			case err := <-through:
				if err != nil {
					t.Errorf("the stream went on: %v", err)
				}
			case <-time.After(testTimeout):
				t.Error("the stream stands")
				l.engine.Kill()
				<-through
			}
		})
	}
}

// TestCUDALoadEventsAreChecked, and are none of the host's.
func TestCUDALoadEventsAreChecked(t *testing.T) {
	ownMachine(t)
	m := newCUDAFixture(t, faultEngine(t), longLimits)
	m.attach(1)
	for _, bad := range []struct {
		off   uint64
		count uint32
	}{{0, 0}, {0, cudaipc.MaxLoadEvents + 1}, {4, 1}, {1 << 40, 1}, {^uint64(0) - 7, 2}} {
		if _, err := m.mover.LoadEvents(1, bad.off, bad.count); !errors.Is(err, cudaipc.ErrRange) {
			t.Errorf("%d at %d: %v", bad.count, bad.off, err)
		}
	}
	if _, err := m.mover.LoadEvents(2, 0, 1); !errors.Is(err, cudaipc.ErrPeer) {
		t.Errorf("of another peer: %v", err)
	}
	l := &loader{fixture: m}
	if _, err := m.mover.LoadEvents(1, l.words(), 3); err != nil {
		t.Fatal(err)
	}
	if _, err := m.mover.LoadEvents(1, l.words(), 3); !errors.Is(err, cudaipc.ErrBusy) {
		t.Errorf("a second time: %v", err)
	}
	if err := m.mover.Close(1); err != nil {
		t.Errorf("Close: %v", err)
	}
	host := newFixture(t, nil)
	host.attach(1)
	if _, err := host.mover.LoadEvents(1, 0, 1); !errors.Is(err, cudaipc.ErrKind) {
		t.Errorf("of a peer without a GPU: %v", err)
	}
}
