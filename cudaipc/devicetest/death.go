package devicetest

import (
	"bytes"
	"errors"

	"github.com/kvagent/kvagent/cudaipc"
)

// long starts many copies of 8 MiB each: too many for any device to end before the next call.
func (c *Session) long(copies int) []cudaipc.Ticket {
	const n, blocks = 256 << 10, 32
	var tickets []cudaipc.Ticket
	for range copies {
		copy := &cudaipc.Copy{Dir: cudaipc.Gather, Sum: true}
		for b := range blocks {
			copy.Runs = append(copy.Runs, cudaipc.Run{
				Region:    1,
				RegionOff: uint64(b) * n,
				ArenaOff:  int64(b) * n,
				Len:       n,
			})
			copy.Blocks = append(copy.Blocks, cudaipc.Block{Runs: 1})
		}
		tickets = append(tickets, c.Submit(copy))
	}
	return tickets
}

func testCloseWhileCopying(t T, f Fixture) {
	c := Start(t, f, Spec{Regions: []int64{8 << 20}})
	tickets := c.long(100)
	if err := c.Peer.Close(); !errors.Is(err, cudaipc.ErrBusy) {
		t.Fatalf("Close while 100 copies run: %v, want ErrBusy", err)
	}
	if err := f.Device.Close(); !errors.Is(err, cudaipc.ErrBusy) {
		t.Fatalf("Close of the device while a peer is open: %v, want ErrBusy", err)
	}
	for _, ticket := range tickets {
		if d := c.Wait(ticket); d.Err != nil {
			t.Fatalf("a copy that a refused Close met: %v", d.Err)
		}
	}
	c.Close()
}

// testDeathDuringImport kills processes while they are imported: each import ends, and leaves
// nothing open that cannot be closed.
func testDeathDuringImport(t T, f Fixture) {
	for range 5 {
		engine := f.Engine(t, Spec{Regions: make64(16, 1<<20), Events: 4})
		im, err := engine.Import()
		if err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() {
			p, err := f.Device.Import(im)
			if err == nil {
				err = p.Close()
			}
			ended <- err
		}()
		engine.Kill()
		if err := <-ended; errors.Is(err, cudaipc.ErrLost) || errors.Is(err, cudaipc.ErrBusy) {
			t.Fatalf("an import whose process died, and its close, ended with %v", err)
		}
	}
}

// testEventsOfTheDead: pending events of a dead process fire or never do, by the fixture, and the
// step word is right in both cases.
func testEventsOfTheDead(t T, f Fixture) {
	c := Start(t, f, small)
	c.Do(Op{Kind: SetStep, Step: 5})
	c.Do(Op{Kind: Synchronize})
	c.Do(Op{Kind: Hold})
	c.Do(Op{Kind: SetStep, Step: 6})
	c.Do(Op{Kind: Record, Index: 0})
	if c.Poll(event(0)).Fired {
		t.Fatal("the event fired before its time")
	}
	c.Kill()
	if f.FireOnDeath {
		c.Until(event(0), "the event of a dead process", func(s cudaipc.State) bool { return s.Fired })
	}
	for range 100 {
		s := c.Poll(event(0))
		if s.Fired != f.FireOnDeath {
			t.Fatalf("the event of a dead process: fired %v, want %v", s.Fired, f.FireOnDeath)
		}
		if s.Step != 5 {
			t.Fatalf("the step word of a process that died in step 6 is %d, want 5", s.Step)
		}
	}
	c.Close()
}

// testDeathWhileCopying: every copy ends, and a block that is not bad is whole.
func testDeathWhileCopying(t T, f Fixture) {
	const n = 8 << 20
	c := Start(t, f, Spec{Regions: []int64{n}})
	c.Do(Op{Kind: Fill, Region: 1, Len: n, Seed: 3})
	tickets := c.long(100)
	c.Wait(tickets[0])
	c.Kill()
	var last cudaipc.Done
	for _, ticket := range tickets[1:] {
		last = c.Wait(ticket)
		if (last.Err == nil) != (last.Bad == nil) {
			t.Fatalf("blocks are bad without a reason, or none is and there is one: %v, %v", last.Bad, last.Err)
		}
	}
	want := make([]byte, n)
	Pattern(want, 3, 0)
	for b := range len(last.Sums) {
		part := n / len(last.Sums)
		bad := last.Bad != nil && last.Bad[b]
		if !bad && !bytes.Equal(f.Arena[b*part:(b+1)*part], want[b*part:(b+1)*part]) {
			t.Fatalf("block %d is said to have arrived after the death of its process, and has wrong bytes", b)
		}
	}
	c.Close()
}
