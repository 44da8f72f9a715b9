package devicetest

import "github.com/kvagent/kvagent/cudaipc"

// tests is the suite.
var tests = []struct {
	name string
	run  func(T, Fixture)
}{
	{"ImportAndClose", testImportAndClose},
	{"ImportRefuses", testImportRefuses},
	{"NothingLeaks", testNothingLeaks},
	{"BytesBothWays", testBytesBothWays},
	{"OddFragments", testOddFragments},
	{"SumsAreCRC32C", testSums},
	{"CopiesAreOrdered", testOrder},
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
	{"DeathDuringImport", testDeathDuringImport},
	{"SamplesAreOfTheEngine", testSamples},
	{"SamplesOutOfRange", testSamplesOutOfRange},
	{"SamplesEnd", testSamplesEnd},
	{"DeathWhileSumming", testDeathWhileSumming},
}

// Tests is what has tests of its own: *testing.T, which programs besides tests do not link.
type Tests[S any] interface {
	T
	Run(name string, test func(S)) bool
}

// TestDevice runs the suite. open makes a fresh fixture for each of its tests.
func TestDevice[S Tests[S]](t S, open func(S) Fixture) {
	for _, test := range tests {
		t.Run(test.name, func(t S) { Run(t, open(t), test.name) })
	}
}

// Run runs one test of the suite on a fixture of its own.
func Run(t T, f Fixture, name string) {
	t.Helper()
	if len(f.Arena) < MinArena {
		t.Fatalf("arena of %d bytes, the suite needs %d", len(f.Arena), MinArena)
	}
	for _, test := range tests {
		if test.name == name {
			test.run(t, f)
			return
		}
	}
	t.Fatalf("the suite has no test %q", name)
}

// Session is an engine imported into the fixture's device. A method that fails ends the test.
type Session struct {
	Fixture
	Peer   cudaipc.Peer
	t      T
	engine Engine
}

// Start starts an engine and imports it, until the test's end.
func Start(t T, f Fixture, s Spec) *Session {
	t.Helper()
	c := &Session{Fixture: f, t: t, engine: f.Engine(t, s)}
	c.attach()
	return c
}

func (c *Session) attach() {
	c.t.Helper()
	im, err := c.engine.Import()
	if err != nil {
		c.t.Fatal(err)
	}
	c.Peer = Import(c.t, c.Device, im)
}

// Import opens regions until the test's end.
func Import(t T, d cudaipc.Device, im cudaipc.Import) cudaipc.Peer {
	t.Helper()
	p, err := d.Import(im)
	if err != nil {
		t.Fatalf("Import: %v", err)
	}
	t.Cleanup(func() { _ = p.Close() }) // again, if the test has closed it
	return p
}

// Do carries out one operation in the engine.
func (c *Session) Do(op Op) []byte {
	c.t.Helper()
	data, err := c.engine.Do(op)
	if err != nil {
		c.t.Fatalf("engine, operation %d: %v", op.Kind, err)
	}
	return data
}

// Submit starts a copy of the peer.
func (c *Session) Submit(copy *cudaipc.Copy) cudaipc.Ticket {
	c.t.Helper()
	ticket, err := c.Peer.Copy(copy)
	if err != nil {
		c.t.Fatalf("Copy: %v", err)
	}
	return ticket
}

// Wait returns the end of a copy or of a sample.
func (c *Session) Wait(ticket cudaipc.Ticket) cudaipc.Done {
	c.t.Helper()
	d, ok, err := ticket(WaitLimit)
	if err != nil || !ok {
		c.t.Fatalf("a ticket returns %v, %v after %v", ok, err, WaitLimit)
	}
	return d
}

// Copy runs a copy to its end, which must be without an error.
func (c *Session) Copy(copy *cudaipc.Copy) cudaipc.Done {
	c.t.Helper()
	d := c.Wait(c.Submit(copy))
	if d.Err != nil || d.Bad != nil {
		c.t.Fatalf("copy: %v, bad blocks %v", d.Err, d.Bad)
	}
	return d
}

// Poll returns the state of what a copy of the peer would wait for.
func (c *Session) Poll(w cudaipc.Wait) cudaipc.State {
	c.t.Helper()
	s, err := c.Peer.Poll(w)
	if err != nil {
		c.t.Fatalf("Poll: %v", err)
	}
	return s
}

// Until polls until good returns true.
func (c *Session) Until(w cudaipc.Wait, what string, good func(cudaipc.State) bool) {
	c.t.Helper()
	var last cudaipc.State
	defer func() {
		if c.t.Failed() {
			c.t.Logf("the last state was %+v", last)
		}
	}()
	Until(c.t, what, func() bool {
		last = c.Poll(w)
		return good(last)
	})
}

// Close closes the peer.
func (c *Session) Close() {
	c.t.Helper()
	if err := c.Peer.Close(); err != nil {
		c.t.Fatalf("Close: %v", err)
	}
}

// Kill ends the engine's process at once, and waits for its end.
func (c *Session) Kill() { c.engine.Kill() }

// one returns a copy of a single block.
func one(dir cudaipc.Direction, runs ...cudaipc.Run) *cudaipc.Copy {
	return &cudaipc.Copy{Dir: dir, Runs: runs, Blocks: []cudaipc.Block{{Runs: uint32(len(runs))}}}
}
