package proof

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
)

// What this driver does where the reference leaves it open. The agent relies on neither ending; a
// device that is lost by one is the mover's to replace, and is an ending too.

// checkEventOfTheDead says what becomes of an event that a process had recorded, when it is killed.
func checkEventOfTheDead(b *bench) error {
	if err := b.open(b.sizes.region); err != nil {
		return err
	}
	if err := b.eventOfTheDead(); err != nil && !errors.Is(err, cudaipc.ErrLost) {
		return err
	}
	b.line.say("the event of a killed process: %s", b.line.Facts["event"])
	return nil
}

// checkCopyOfTheDead says what becomes of copies from a process's memory that run, when it is
// killed.
func checkCopyOfTheDead(b *bench) error {
	if err := b.open(b.sizes.region + b.sizes.every); err != nil {
		return err
	}
	if err := b.copyOfTheDead(); err != nil && !errors.Is(err, cudaipc.ErrLost) {
		return err
	}
	b.line.say("copies from the memory of a killed process: %s", b.line.Facts["copy"])
	return nil
}

func (b *bench) eventOfTheDead() error {
	e, err := b.engine(false, b.sizes.region)
	if err != nil {
		return err
	}
	peer, err := b.admit(e, false) // a device that knows the process would not ask the event
	if err != nil {
		return err
	}
	if _, err := e.do(&order{Op: opHold}); err != nil {
		return err
	}
	if st, err := b.poll(peer, 0); err != nil || st.Fired {
		return errors.Join(err, fmt.Errorf("an event behind a stream that stands still has fired: %v", st.Fired))
	}
	begin := time.Now()
	e.kill()
	b.line.Facts["event"] = "never fires"
	for time.Since(begin) < deadEvent {
		st, err := b.poll(peer, 0)
		if err != nil {
			b.line.Facts["event"] = err.Error()
			break
		}
		if st.Fired {
			b.line.Facts["event"] = "fires"
			b.line.Figures["event_fires_ms"] = float64(time.Since(begin).Milliseconds())
			break
		}
		time.Sleep(lookEvery)
	}
	return b.device.Close(peer)
}

// underWay is how many copies of a region are handed in before its process is killed: a quarter of
// a second's, where a copy engine has 30 GiB/s.
const underWay = 16

func (b *bench) copyOfTheDead() error {
	e, err := b.engine(false, b.sizes.region, b.sizes.every)
	if err != nil {
		return err
	}
	peer, err := b.admit(e, false) // a device that knows the process would not trust its copies
	if err != nil {
		return err
	}
	if _, err := e.do(&order{Op: opFill, Region: 2, Seed: 5}); err != nil {
		return err
	}
	tickets, err := b.copiesUnderWay(peer)
	if err != nil {
		return err
	}
	begin := time.Now()
	e.killNow()
	good := 0
	for _, t := range tickets {
		end, ok, err := b.device.Done(t, copyWithin)
		if errors.Is(err, cudaipc.ErrLost) {
			b.line.Facts["copy"] = err.Error()
			return nil
		}
		if err != nil || !ok {
			return errors.Join(err, fmt.Errorf("a copy from a dead process's memory did not end within %v", copyWithin))
		}
		if end.Bad == nil {
			good++
		}
	}
	b.line.Figures["copies_ended_ms"] = float64(time.Since(begin).Milliseconds())
	lost := wrong(b.arena.mem[b.sizes.region:b.sizes.region+b.sizes.every], 5)
	b.line.Figures["lost_bytes"] = float64(lost)
	b.line.Facts["copy"] = fmt.Sprintf(
		"%d of %d end without an error, and of the last one %d of %d bytes did not arrive",
		good, len(tickets), lost, b.sizes.every)
	e.kill()
	return b.device.Close(peer)
}

// copiesUnderWay hands in copies of region 1, and behind them one of region 2 to a place of its
// own.
func (b *bench) copiesUnderWay(peer cudaipc.PeerID) (tickets []cudaipc.Ticket, err error) {
	for i := range underWay + 1 {
		run := cudaipc.Run{Region: 1, Len: uint32(b.sizes.region)}
		if i == underWay {
			run = cudaipc.Run{Region: 2, ArenaOff: b.sizes.region, Len: uint32(b.sizes.every)}
		}
		t, err := b.device.Copy(&cudaipc.Copy{
			Peer:   peer,
			Dir:    cudaipc.Gather,
			Runs:   []cudaipc.Run{run},
			Blocks: []cudaipc.Block{{Runs: 1}},
		})
		if err != nil {
			return nil, err
		}
		tickets = append(tickets, t)
	}
	return tickets, nil
}
