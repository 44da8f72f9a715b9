package devicetest

import (
	"testing"

	"github.com/kvagent/kvagent/cudaipc"
)

// TestDevice runs the suite. open makes a fresh fixture for each of its tests.
func TestDevice(t *testing.T, open func(t *testing.T) Fixture) {
	for _, test := range []struct {
		name string
		run  func(*testing.T, Fixture)
	}{
		{"ImportAndClose", testImportAndClose},
		{"ImportRefuses", testImportRefuses},
		{"NothingLeaks", testNothingLeaks},
		{"BytesBothWays", testBytesBothWays},
		{"OddFragments", testOddFragments},
		{"SumsAreCRC32C", testSums},
		{"CopiesAreOrdered", testOrder},
		{"TicketsAreForgotten", testTickets},
		{"OutOfRange", testOutOfRange},
		{"AnotherPeersRegion", testAnotherPeersRegion},
		{"EventsAndSteps", testEventsAndSteps},
		{"EventRecordedAgain", testEventRecordedAgain},
		{"RevocationWords", testRevocationWords},
		{"WordsOutOfRange", testWordsOutOfRange},
		{"WordsAreWritten", testWordsAreWritten},
		{"StaleWithoutWaiting", testStaleWithoutWaiting},
		{"CloseWhileCopying", testCloseWhileCopying},
		{"EventsOfTheDead", testEventsOfTheDead},
		{"DeathWhileCopying", testDeathWhileCopying},
		{"SamplesAreOfTheEngine", testSamples},
		{"SamplesOutOfRange", testSamplesOutOfRange},
		{"SamplesEnd", testSamplesEnd},
		{"DeathWhileSumming", testDeathWhileSumming},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := open(t)
			if len(f.Arena) < MinArena {
				t.Fatalf("arena of %d bytes, the suite needs %d", len(f.Arena), MinArena)
			}
			test.run(t, f)
		})
	}
}

// session is an engine imported into the fixture's device.
type session struct {
	Fixture
	t      testing.TB
	peer   cudaipc.PeerID
	engine Engine
}

func start(t testing.TB, f Fixture, peer cudaipc.PeerID, s Spec) *session {
	t.Helper()
	c := &session{Fixture: f, t: t, peer: peer, engine: f.Engine(t, s)}
	c.attach()
	return c
}

func (c *session) attach() {
	c.t.Helper()
	im, err := c.engine.Import(c.peer)
	if err != nil {
		c.t.Fatal(err)
	}
	if err := c.Device.Import(im); err != nil {
		c.t.Fatalf("Import: %v", err)
	}
}

func (c *session) do(op Op) []byte {
	c.t.Helper()
	data, err := c.engine.Do(op)
	if err != nil {
		c.t.Fatalf("engine, operation %d: %v", op.Kind, err)
	}
	return data
}

func (c *session) submit(copy *cudaipc.Copy) cudaipc.Ticket {
	c.t.Helper()
	copy.Peer = c.peer
	ticket, err := c.Device.Copy(copy)
	if err != nil {
		c.t.Fatalf("Copy: %v", err)
	}
	return ticket
}

func (c *session) wait(ticket cudaipc.Ticket) cudaipc.Done {
	c.t.Helper()
	d, ok, err := c.Device.Done(ticket, WaitLimit)
	if err != nil || !ok {
		c.t.Fatalf("Done(%d) = %v, %v after %v", ticket, ok, err, WaitLimit)
	}
	return d
}

// copy runs a copy to its end, which must be without an error.
func (c *session) copy(copy *cudaipc.Copy) cudaipc.Done {
	c.t.Helper()
	d := c.wait(c.submit(copy))
	if d.Err != nil || d.Bad != nil {
		c.t.Fatalf("copy: %v, bad blocks %v", d.Err, d.Bad)
	}
	return d
}

func (c *session) poll(w cudaipc.Wait) cudaipc.State {
	c.t.Helper()
	w.Peer = c.peer
	var s [1]cudaipc.State
	if err := c.Device.Poll([]cudaipc.Wait{w}, s[:]); err != nil {
		c.t.Fatalf("Poll: %v", err)
	}
	return s[0]
}

// until polls until good returns true.
func (c *session) until(w cudaipc.Wait, what string, good func(cudaipc.State) bool) {
	c.t.Helper()
	var last cudaipc.State
	defer func() {
		if c.t.Failed() {
			c.t.Logf("the last state was %+v", last)
		}
	}()
	Until(c.t, what, func() bool {
		last = c.poll(w)
		return good(last)
	})
}

func (c *session) close() {
	c.t.Helper()
	if err := c.Device.Close(c.peer); err != nil {
		c.t.Fatalf("Close: %v", err)
	}
}

// one returns a copy of a single block.
func one(dir cudaipc.Direction, runs ...cudaipc.Run) *cudaipc.Copy {
	return &cudaipc.Copy{Dir: dir, Runs: runs, Blocks: []cudaipc.Block{{Runs: uint32(len(runs))}}}
}
