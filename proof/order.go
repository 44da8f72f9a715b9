package proof

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
)

// lateTries is how often the copy without a wait is tried, each time with twice the delay: a
// machine may be paused for longer than the delay.
const lateTries = 5

// checkOrder delays a producer. A copy without a wait must get old bytes, or the check shows
// nothing; a copy that waits for step word and event must get the step's bytes.
func checkOrder(b *bench) error {
	if err := b.open(b.sizes.region); err != nil {
		return err
	}
	e, err := b.engine(false, b.sizes.region)
	if err != nil {
		return err
	}
	peer, err := b.admit(e, true)
	if err != nil {
		return err
	}
	all := b.sizes.region / 4
	stale, delay := all, b.sizes.delay/2
	step := uint64(0)
	for stale == all && step < lateTries {
		step, delay = step+1, 2*delay
		if stale, _, err = b.late(e, peer, step, delay, false); err != nil {
			return err
		}
	}
	fresh, waited, err := b.late(e, peer, step+1, delay, true)
	if err != nil {
		return err
	}
	b.line.Figures["unwaited_new_share"], b.line.Figures["waited_new_share"] = float64(stale)/float64(all),
		float64(fresh)/float64(all)
	b.line.Figures["delay_ms"], b.line.Figures["waited_ms"] = float64(delay.Milliseconds()),
		float64(waited.Milliseconds())
	b.line.say("a step %v late: without the wait %d of %d words are new (it has to fail), with it %d", delay, stale,
		all, fresh)
	switch {
	case stale == all:
		return errors.New("the copy that did not wait has all new bytes: the delay showed nothing")
	case fresh != all:
		return fmt.Errorf("the copy that waited has %d of %d words of the step", fresh, all)
	case waited < delay/2:
		return fmt.Errorf("the step was waited for %v, and was %v late", waited, delay)
	}
	return nil
}

// late copies after it has started a delayed step, and counts the words of the step.
func (b *bench) late(e *child, peer cudaipc.PeerID, step uint64, delay time.Duration, wait bool) (fresh int64,
	waited time.Duration, err error) {
	word := uint32(0x1000 + step)
	begin := time.Now()
	if _, err = e.do(&order{Op: opProduce, Region: 1, Delay: delay, Word: word, Step: step}); err != nil {
		return 0, 0, err
	}
	if wait {
		if err = b.await(peer, step); err != nil {
			return 0, 0, err
		}
		waited = time.Since(begin)
	}
	if err = b.move(peer, cudaipc.Gather, 1, b.sizes.region); err != nil {
		return 0, 0, err
	}
	fresh = words(b.arena.mem[:b.sizes.region], word)
	if !wait {
		err = b.await(peer, step) // the step is over before the next
	}
	return fresh, waited, err
}

// await waits for a step: its word, then event 0.
func (b *bench) await(peer cudaipc.PeerID, step uint64) error {
	for begin := time.Now(); time.Since(begin) < answerWithin; time.Sleep(lookEvery) {
		st, err := b.poll(peer, step)
		if err != nil {
			return err
		}
		if st.Step >= step && st.Fired {
			return nil
		}
	}
	return fmt.Errorf("step %d did not end within %v", step, answerWithin)
}

func (b *bench) poll(peer cudaipc.PeerID, step uint64) (cudaipc.State, error) {
	states := make([]cudaipc.State, 1)
	err := b.device.Poll([]cudaipc.Wait{{Peer: peer, Event: 0, Revoke: cudaipc.None, Step: step}}, states)
	return states[0], err
}
