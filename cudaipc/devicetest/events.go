package devicetest

import (
	"bytes"
	"errors"

	"github.com/kvagent/kvagent/cudaipc"
)

func event(i uint32) cudaipc.Wait { return cudaipc.Wait{Event: i, Revoke: cudaipc.None} }

func testEventsAndSteps(t T, f Fixture) {
	c := Start(t, f, small)
	if s := c.Poll(event(0)); !s.Fired || s.Step != 0 || s.Revoked {
		t.Errorf("an event that was never recorded: %+v, want it fired, step 0", s)
	}
	if s := c.Poll(event(cudaipc.None)); !s.Fired {
		t.Errorf("no event: %+v, want it fired", s)
	}
	c.Do(Op{Kind: Hold})
	c.Do(Op{Kind: SetStep, Step: 41})
	c.Do(Op{Kind: Record, Index: 1})
	for range 100 {
		if s := c.Poll(event(1)); s.Fired || s.Step != 0 {
			t.Fatalf("an event after a kernel that runs: %+v, want neither event nor step", s)
		}
	}
	if s := c.Poll(event(2)); !s.Fired {
		t.Errorf("another event: %+v, want it fired", s)
	}
	c.Do(Op{Kind: LetGo})
	c.Until(event(1), "the event", func(s cudaipc.State) bool {
		if s.Fired && s.Step != 41 {
			t.Fatalf("the event fired before the step word was written: %+v", s)
		}
		return s.Fired
	})
}

func testEventRecordedAgain(t T, f Fixture) {
	c := Start(t, f, small)
	for step := uint64(1); step <= 20; step++ {
		c.Do(Op{Kind: Hold})
		c.Do(Op{Kind: SetStep, Step: step})
		c.Do(Op{Kind: Record, Index: 3})
		if s := c.Poll(event(3)); s.Fired {
			t.Fatalf("step %d: an event recorded again has fired already", step)
		}
		c.Do(Op{Kind: LetGo})
		c.Until(event(3), "the event", func(s cudaipc.State) bool { return s.Fired && s.Step == step })
	}
}

func testRevocationWords(t T, f Fixture) {
	c := Start(t, f, small)
	w := cudaipc.Wait{Event: cudaipc.None, Revoke: 2}
	if c.Poll(w).Revoked {
		t.Error("revoked from the start")
	}
	c.Do(Op{Kind: Revoke, Index: 2})
	if !c.Poll(w).Revoked {
		t.Error("a revocation is not seen")
	}
	if s := c.Poll(cudaipc.Wait{Event: cudaipc.None, Revoke: 1}); s.Revoked {
		t.Error("another word is revoked too")
	}
	c.Do(Op{Kind: ClearRevoke, Index: 2})
	if c.Poll(w).Revoked {
		t.Error("a cleared word is revoked still")
	}
}

// testWordsAreWritten writes the step word, which Poll then reads.
func testWordsAreWritten(t T, f Fixture) {
	c := Start(t, f, small)
	im, err := c.engine.Import()
	if err != nil {
		t.Fatal(err)
	}
	im.CloseAll()
	at := im.Sync.StepOff
	if err := c.Peer.SetWord(at, 1<<40+7); err != nil {
		t.Fatal(err)
	}
	if s := c.Poll(event(cudaipc.None)); s.Step != 1<<40+7 {
		t.Errorf("step %d, want the word that was written", s.Step)
	}
	for _, off := range []uint64{at + 4, 1 << 40, 1<<64 - 8, 1<<64 - 1} {
		if err := c.Peer.SetWord(off, 1); !errors.Is(err, cudaipc.ErrRange) {
			t.Errorf("a word at %d: %v, want ErrRange", off, err)
		}
	}
	c.Close()
	if err := c.Peer.SetWord(at, 1); !errors.Is(err, cudaipc.ErrPeer) {
		t.Errorf("a word of a closed peer: %v, want ErrPeer", err)
	}
}

// testStaleWithoutWaiting shows that nothing waits by itself: without the event, the copy has
// old bytes.
func testStaleWithoutWaiting(t T, f Fixture) {
	const n = 256 << 10
	c := Start(t, f, small)
	c.Do(Op{Kind: Fill, Region: 1, Len: n, Seed: 1})
	c.Do(Op{Kind: Hold})
	c.Do(Op{Kind: LaunchSet, Region: 1, Len: n, Index: 0x04030201})
	c.Do(Op{Kind: Record, Index: 0})
	copy := one(cudaipc.Gather, cudaipc.Run{Region: 1, Len: n})
	old, fresh := make([]byte, n), bytes.Repeat([]byte{1, 2, 3, 4}, n/4)
	Pattern(old, 1, 0)
	c.Copy(copy)
	if !bytes.Equal(f.Arena[:n], old) {
		t.Error("a copy without waiting read wrong bytes")
	}
	c.Do(Op{Kind: LetGo})
	c.Until(event(0), "the event", func(s cudaipc.State) bool { return s.Fired })
	c.Copy(copy)
	if !bytes.Equal(f.Arena[:n], fresh) {
		t.Error("a copy after the event read other bytes than the kernel wrote")
	}
}
