package proof

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
)

// checkEngineKilled kills an engine while its memory is copied, and waits until all of it is free
// again.
func checkEngineKilled(b *bench) error {
	if err := b.open(b.sizes.region); err != nil {
		return err
	}
	before := b.free()
	e, err := b.engine(false, 2*b.sizes.region)
	if err != nil {
		return err
	}
	peer, err := b.admit(e, true)
	if err != nil {
		return err
	}
	if held := before - b.device.Info().Free; held < 2*b.sizes.region {
		return fmt.Errorf("an engine with %d bytes holds %d", 2*b.sizes.region, held)
	}
	t, err := b.device.Copy(b.scattered(peer, cudaipc.Gather, 64<<10))
	if err != nil {
		return err
	}
	begin := time.Now()
	e.killNow()
	if _, ok, err := b.device.Done(t, copyWithin); !ok || err != nil {
		return errors.Join(err, fmt.Errorf("a copy from a dead process's memory did not end within %v", copyWithin))
	}
	if err := b.device.Close(peer); err != nil {
		return err
	}
	return b.report(e, before, begin)
}

// report waits for the memory of a killed child and reports when it was free.
func (b *bench) report(c *child, before int64, begin time.Time) error {
	ms, err := b.back(before, begin)
	c.kill()
	if err != nil {
		return err
	}
	b.line.Figures["back_ms"] = ms
	b.line.say("its GPU memory was free again %.0f ms after SIGKILL", ms)
	b.line.aim("memory back, ms", ms, backTarget, true)
	return nil
}

// warmUpDelay is how long after its first message a starting engine is killed: some of its memory
// exists by then, but not all.
const warmUpDelay = 5 * time.Millisecond

// checkWarmUpKilled kills an engine while it is being imported.
func checkWarmUpKilled(b *bench) error {
	if err := b.open(b.sizes.region); err != nil {
		return err
	}
	before := b.free()
	e, err := b.engine(true, b.sizes.region, b.sizes.region)
	if err != nil {
		return err
	}
	im, err := e.describe(1)
	if err != nil {
		return err
	}
	imported := make(chan error, 1)
	go func() { imported <- b.device.Import(im) }()
	time.Sleep(warmUpDelay)
	begin := time.Now()
	e.killNow()
	err = <-imported
	b.line.Facts["import"] = fmt.Sprintf("ended with %v", err)
	if err == nil {
		if err := b.device.Close(1); err != nil {
			return err
		}
	} else if errors.Is(err, cudaipc.ErrLost) {
		return err
	}
	// The parent's copies of the engine's descriptors keep its memory, too: an agent closes them
	// with the session.
	e.kill()
	return b.report(e, before, begin)
}

// checkAgentKilled kills an agent that copies an engine's memory: the engine's memory stays
// unchanged, and the agent's is free again.
func checkAgentKilled(b *bench) error {
	if err := b.open(b.sizes.region); err != nil {
		return err
	}
	e, err := b.engine(false, b.sizes.region)
	if err != nil {
		return err
	}
	if _, err := e.do(&order{Op: opFill, Region: 1, Seed: 3}); err != nil {
		return err
	}
	before := b.free()
	a, err := b.agentOf(e)
	if err != nil {
		return err
	}
	if _, err := a.do(&order{Op: opCopy, Region: 1, Len: b.sizes.region}); err != nil {
		return err
	}
	time.Sleep(b.sizes.delay) // it is in the middle of its copies
	begin := time.Now()
	a.killNow()
	if err := b.report(a, before, begin); err != nil {
		return err
	}
	left, err := e.do(&order{Op: opCheck, Region: 1, Seed: 3})
	if err != nil {
		return fmt.Errorf("the engine, after the agent's death: %w", err)
	}
	b.line.Figures["engine_wrong_bytes"] = float64(left.Wrong)
	b.line.say("the engine goes on, %d of its bytes wrong", left.Wrong)
	if left.Wrong > 0 {
		return fmt.Errorf("%d bytes of the engine are wrong after the agent's death", left.Wrong)
	}
	return nil
}

// agentOf starts an agent that has an engine's memory open.
func (b *bench) agentOf(e *child) (*child, error) {
	im, err := e.describe(1)
	if err != nil {
		return nil, err
	}
	var fds []int
	for i := range im.Regions {
		if withFD(&im.Regions[i]) {
			fds = append(fds, im.Regions[i].FD)
		}
	}
	defer closeAll(fds)
	return b.start(&order{Op: opAgent, Sizes: []int64{b.sizes.region}, Import: &im}, fds...)
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}
