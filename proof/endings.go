package proof

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
)

// These checks find out what the driver does where the reference leaves it open. The agent relies
// on neither ending. Losing the device is a third one, after which the mover is replaced.

// checkEventAfterDeath finds out whether the pending event of a killed process fires.
func checkEventAfterDeath(b *bench) error {
	if err := b.open(b.sizes.region); err != nil {
		return err
	}
	if err := b.eventAfterDeath(); err != nil && !errors.Is(err, cudaipc.ErrLost) {
		return err
	}
	b.line.say("the event of a killed process: %s", b.line.Facts["event"])
	return nil
}

// checkCopyAfterDeath finds out how copies in flight end when the process of their memory is
// killed.
func checkCopyAfterDeath(b *bench) error {
	if err := b.open(b.sizes.region + b.sizes.every); err != nil {
		return err
	}
	if err := b.copyAfterDeath(); err != nil && !errors.Is(err, cudaipc.ErrLost) {
		return err
	}
	b.line.say("copies from the memory of a killed process: %s", b.line.Facts["copy"])
	return nil
}

func (b *bench) eventAfterDeath() error {
	e, err := b.engine(false, b.sizes.region)
	if err != nil {
		return err
	}
	peer, err := b.admit(e, false) // with the pid the device would not ask the event
	if err != nil {
		return err
	}
	if _, err := e.do(&order{Op: opHold}); err != nil {
		return err
	}
	if st, err := b.poll(peer, 0); err != nil || st.Fired {
		return errors.Join(err, fmt.Errorf("an event after a waiting stream has fired: %v", st.Fired))
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

// inFlight is how many copies of a region are submitted before its process is killed: a quarter
// of a second at 30 GiB/s.
const inFlight = 16

func (b *bench) copyAfterDeath() error {
	e, err := b.engine(false, b.sizes.region, b.sizes.every)
	if err != nil {
		return err
	}
	peer, err := b.admit(e, false) // with the pid the device would not trust its copies
	if err != nil {
		return err
	}
	if _, err := e.do(&order{Op: opFill, Region: 2, Seed: 5}); err != nil {
		return err
	}
	tickets, err := b.copiesInFlight(peer)
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

// copiesInFlight submits copies of region 1, and then one of region 2 to a place of its own.
func (b *bench) copiesInFlight(peer cudaipc.PeerID) (tickets []cudaipc.Ticket, err error) {
	for i := range inFlight + 1 {
		run := cudaipc.Run{Region: 1, Len: uint32(b.sizes.region)}
		if i == inFlight {
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
