package delivery

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvagent/kvagent/pool"
)

const (
	p, d  = uint64(7), uint64(8) // sessions of the two engines
	space = pool.SpaceID(3)
	ttl   = 30 * time.Second
)

func (t *Table) offer(name string) bool { return t.Offer(space, []byte(name), p, 160, ttl) }

func expect(t *testing.T, table *Table, name string, want Transfer) {
	t.Helper()
	if got := table.State(space, []byte(name)); got != want {
		t.Errorf("%s: %+v, want %+v", name, got, want)
	}
}

func counts(t *testing.T, table *Table, open, complete int, want Counts) {
	t.Helper()
	got := table.Report()
	if got.Open != open || got.Complete != complete || got.Counts != want {
		t.Errorf("%+v, want %d open, %d complete, %+v", got, open, complete, want)
	}
}

// A transfer is open from OFFER to OFFERED, complete until DELIVERED, and not known before and
// after.
func TestLifeOfATransfer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := New(Config{})
		expect(t, table, "a", Transfer{})
		table.offer("a")
		expect(t, table, "a", Transfer{Open, 160})
		expect(t, table, "b", Transfer{})
		if got := table.State(space+1, []byte("a")); got != (Transfer{}) {
			t.Errorf("another space has it: %+v", got)
		}
		table.Offered(space, []byte("a"), p, 144)
		expect(t, table, "a", Transfer{Complete, 144})
		counts(t, table, 0, 1, Counts{Opened: 1, Completed: 1})
		table.Delivered(space, []byte("a"))
		expect(t, table, "a", Transfer{})
		table.Delivered(space, []byte("a"))
		counts(t, table, 0, 0, Counts{Opened: 1, Completed: 1, Delivered: 1})
	})
}

// A decode engine may have all blocks, or give up, before the prefill engine says that it is done.
// The transfer ends then too, and its sender's last words do not open it again.
func TestDeliveredBeforeItIsComplete(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := New(Config{})
		for _, name := range []string{"offered", "renewed", "abandoned", "expired"} {
			table.offer(name)
			table.Delivered(space, []byte(name))
			table.Delivered(space, []byte(name))
			expect(t, table, name, Transfer{Complete, 160}) // not waited for
		}
		counts(t, table, 0, 0, Counts{Opened: 4, Delivered: 4})
		table.Offered(space, []byte("offered"), p, 160)
		expect(t, table, "offered", Transfer{})
		table.offer("renewed")
		table.Offered(space, []byte("renewed"), p, 160)
		expect(t, table, "renewed", Transfer{})
		counts(t, table, 0, 0, Counts{Opened: 4, Completed: 2, Delivered: 4})
		time.Sleep(ttl)
		counts(t, table, 0, 0, Counts{Opened: 4, Completed: 2, Delivered: 4})
		table.offer("abandoned")
		table.Delivered(space, []byte("abandoned"))
		table.EndSession(p)
		counts(t, table, 0, 0, Counts{Opened: 5, Completed: 2, Delivered: 5})
		if n := len(table.mu.transfers); n != 0 {
			t.Errorf("%d transfers are remembered", n)
		}
	})
}

// OFFERED of an unknown name opens and completes it; another OFFER opens a complete one anew.
func TestOfferedWithoutOfferAndOfferAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := New(Config{TTL: time.Second})
		table.Offered(space, []byte("a"), p, 16)
		expect(t, table, "a", Transfer{Complete, 16})
		table.offer("a")
		expect(t, table, "a", Transfer{Open, 160})
		counts(t, table, 1, 0, Counts{Opened: 2, Completed: 1})
		table.Offered(space, []byte("b"), p, 16)
		time.Sleep(time.Second - 1)
		expect(t, table, "b", Transfer{Complete, 16})
		time.Sleep(time.Nanosecond)
		expect(t, table, "b", Transfer{})
	})
}

// A transfer ends its time after the last OFFER or OFFERED, open or complete.
func TestTimeToLive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := New(Config{})
		table.offer("renewed")
		table.offer("open")
		table.offer("complete")
		time.Sleep(ttl / 2)
		table.offer("renewed")
		table.Offered(space, []byte("complete"), p, 160)
		time.Sleep(ttl / 2)
		expect(t, table, "renewed", Transfer{Open, 160})
		expect(t, table, "complete", Transfer{Complete, 160})
		counts(t, table, 1, 1, Counts{Opened: 3, Completed: 1, Expired: 1})
		time.Sleep(ttl/2 - 1)
		counts(t, table, 1, 1, Counts{Opened: 3, Completed: 1, Expired: 1})
		time.Sleep(time.Nanosecond)
		counts(t, table, 0, 0, Counts{Opened: 3, Completed: 1, Expired: 3})
	})
}

// The end of the session that offered a transfer completes it; others' transfers stay open.
func TestSessionEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := New(Config{})
		table.offer("a")
		table.Offer(space, []byte("b"), d, 160, ttl)
		table.EndSession(p)
		expect(t, table, "a", Transfer{Complete, 160})
		expect(t, table, "b", Transfer{Open, 160})
		counts(t, table, 1, 1, Counts{Opened: 2, Completed: 1, Abandoned: 1})
	})
}

// Beyond the limit a new transfer is refused until others have ended.
func TestTooManyTransfers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := New(Config{})
		for i := range MaxTransfers {
			if !table.offer(fmt.Sprint(i)) {
				t.Fatalf("transfer %d is refused", i)
			}
		}
		if table.offer("one more") || table.Offered(space, []byte("another"), p, 16) {
			t.Error("one more than allowed is open")
		}
		expect(t, table, "one more", Transfer{})
		if !table.offer("5") {
			t.Error("a renewal at the limit is refused")
		}
		counts(t, table, MaxTransfers, 0, Counts{Opened: MaxTransfers, Refused: 2})
		time.Sleep(ttl)
		if !table.offer("later") {
			t.Error("refused although all others have expired")
		}
		if got := table.Report(); got.Open != 1 || got.Complete != 0 {
			t.Errorf("%+v, want 1 open", got)
		}
	})
}

// A watcher's channel is closed by whatever happens in its space after the state was read, and by
// nothing else.
func TestWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := New(Config{})
		happens := map[string]func(){
			"offer":     func() { table.offer("a") },
			"commit":    func() { table.Committed(space) },
			"offered":   func() { table.Offered(space, []byte("a"), p, 160) },
			"delivered": func() { table.Delivered(space, []byte("a")) },
			"end":       func() { table.offer("a"); table.EndSession(p) },
			"expire":    func() { time.Sleep(2 * ttl); table.Expire() },
		}
		for _, what := range []string{"offer", "commit", "offered", "delivered", "offer", "end", "expire"} {
			_, changed := table.Watch(space, "a")
			_, same := table.Watch(space, "another")
			table.Committed(space + 1)
			select {
			case <-changed:
				t.Errorf("before %s: the channel is closed by another space's commit", what)
			default:
			}
			happens[what]()
			select {
			case <-changed:
				<-same
			default:
				t.Errorf("%s does not wake the watcher", what)
			}
		}
		if n := table.watching.Load(); n != 0 {
			t.Errorf("%d spaces are watched, want 0: commits cost a lock", n)
		}
	})
}

// fetching is a table whose fetches run until told to end.
type fetching struct {
	*Table
	began     chan *Request
	end       chan error
	delivered []string
}

func newFetching() *fetching {
	f := &fetching{began: make(chan *Request, MaxFetches), end: make(chan error)}
	f.Table = New(Config{
		Fetch: func(ctx context.Context, r *Request) error {
			f.began <- r
			select {
			case err := <-f.end:
				return err
			case <-ctx.Done():
				return ctx.Err()
			}
		},
		Deliver: func(peer string, _ pool.Fingerprint, name string) {
			f.delivered = append(f.delivered, name+" to "+peer)
		},
	})
	return f
}

// ask is a look-up that names a transfer of another agent.
func (f *fetching) ask(name, peer string, session uint64) bool {
	if running, known := f.Fetching(space, []byte(name), peer, session); known {
		return running
	}
	return f.Start(&Request{Peer: peer, Name: name, Space: space, Chains: make([]Chain, 1)}, session)
}

func (f *fetching) asks(t *testing.T, name, peer string, session uint64, want bool) {
	t.Helper()
	if got := f.ask(name, peer, session); got != want {
		t.Errorf("%s at %s: fetching %v, want %v", name, peer, got, want)
	}
}

// The first look-up starts the fetch, the others join it, and when it has ended it is not started
// again.
func TestOneFetchForATransfer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFetching()
		f.asks(t, "a", "h:1", d, true)
		f.asks(t, "a", "h:1", d+1, true)
		if r := <-f.began; r.Name != "a" || r.Peer != "h:1" {
			t.Errorf("%+v", r)
		}
		f.end <- nil
		synctest.Wait()
		f.asks(t, "a", "h:1", d, false)
		if got := f.Report(); got.Fetching != 0 || got.Fetches != 1 || got.FetchesFailed != 0 {
			t.Errorf("%+v", got)
		}
		f.asks(t, "a", "h:2", d, true) // another prefill engine computes it again
		<-f.began
		f.end <- errors.New("lost")
		synctest.Wait()
		f.asks(t, "a", "h:2", d, false)
		if got := f.Report(); got.FetchesFailed != 1 || got.Fetches != 2 {
			t.Errorf("%+v", got)
		}
		time.Sleep(DefaultTTL)
		f.Expire()
		if n := len(f.mu.fetches); n != 0 || f.mu.asked.Len() != 0 {
			t.Errorf("%d fetches are remembered after their time", n)
		}
		f.Close()
	})
}

// DELIVERED ends the fetch and tells the other agent once; look-ups do not start it again.
func TestDeliveredEndsTheFetch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFetching()
		f.asks(t, "a", "h:1", d, true)
		<-f.began
		f.Delivered(space, []byte("a"))
		f.Delivered(space, []byte("a"))
		f.asks(t, "a", "h:1", d, false)
		synctest.Wait()
		if got := f.Report(); got.Fetching != 0 || got.FetchesCancelled != 1 {
			t.Errorf("%+v", got)
		}
		f.asks(t, "b", "h:1", d, true)
		f.end <- nil
		synctest.Wait()
		f.Delivered(space, []byte("b"))
		if f.Start(&Request{Peer: "h:2", Name: "c", Space: space}, d) {
			t.Error("a fetch of nothing runs")
		}
		f.asks(t, "c", "h:2", d, false)
		f.Delivered(space, []byte("c"))
		if fmt.Sprint(f.delivered) != "[a to h:1 b to h:1 c to h:2]" {
			t.Errorf("told: %v", f.delivered)
		}
	})
}

// A fetch ends when the last session that asked for it has ended, or when nobody has asked for it
// for a while.
func TestNobodyWantsTheFetch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFetching()
		f.asks(t, "a", "h:1", d, true)
		f.asks(t, "a", "h:1", d+1, true)
		f.asks(t, "b", "h:1", d+1, true)
		f.EndSession(d)
		synctest.Wait()
		if got := f.Report(); got.Fetching != 2 {
			t.Errorf("%+v, want 2 fetches: another session wants them", got)
		}
		time.Sleep(DefaultTTL - 1)
		f.asks(t, "b", "h:1", d+1, true)
		time.Sleep(time.Nanosecond)
		f.Expire()
		synctest.Wait()
		if got := f.Report(); got.Fetching != 1 || got.FetchesCancelled != 1 {
			t.Errorf("%+v, want only the one that was asked for", got)
		}
		f.EndSession(d + 1)
		synctest.Wait()
		if got := f.Report(); got.Fetching != 0 || got.FetchesCancelled != 2 {
			t.Errorf("%+v, want none", got)
		}
	})
}

// At most so many fetches run and are remembered; Close ends them and refuses further ones.
func TestTooManyFetches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFetching()
		for i := range MaxFetches {
			f.asks(t, fmt.Sprint(i), "h:1", d, true)
		}
		f.asks(t, "one more", "h:1", d, false)
		f.Close()
		f.asks(t, "later", "h:1", d, false)
		if got := f.Report(); got.Fetching != 0 || got.FetchesRefused != 2 || got.FetchesCancelled != MaxFetches {
			t.Errorf("%+v", got)
		}
		none := New(Config{})
		if none.Start(&Request{Name: "a", Space: space}, d) {
			t.Error("a fetch runs without a way to fetch")
		}
	})
}

// The hashes of all fetches that run are bounded, and those of one that has ended make room.
func TestFetchBytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFetching()
		defer f.Close()
		const blocks = 1 << 16
		blob := make([]byte, blocks*32)
		start := func(name string, blocks int) bool {
			return f.Start(&Request{
				Peer: "h:1", Name: name, Space: space,
				Chains: []Chain{
					{Hashes: pool.Chain(blob[:blocks*16], 32)},
					{Group: 1, Hashes: pool.Chain(blob[blocks*16:blocks*32], 32)},
				},
			}, d)
		}
		n := 0
		for ; n < MaxFetchBytes/len(blob); n++ {
			if !start(fmt.Sprint(n), blocks) {
				t.Fatalf("%d of %d bytes are all", n*len(blob), MaxFetchBytes)
			}
		}
		if start("one more", 2) {
			t.Error("there is room beyond the limit")
		}
		if got := f.Report(); got.FetchesRefused != 1 || got.Fetching != n {
			t.Errorf("%+v", got)
		}
		f.end <- nil
		synctest.Wait()
		if !start("again", blocks) || start("one more", 2) {
			t.Error("a fetch that ended made no room, or more than it had")
		}
	})
}

// Records of fetches that have ended are bounded: the one not asked for longest is forgotten.
func TestTooManyRecords(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFetching()
		for i := range maxRecords + 1 {
			f.asks(t, fmt.Sprint(i), "h:1", d, true)
			<-f.began
			f.end <- nil
			synctest.Wait()
			f.asks(t, "0", "h:1", d, false)
		}
		if n := len(f.mu.fetches); n != maxRecords {
			t.Errorf("%d are remembered, want %d", n, maxRecords)
		}
		f.asks(t, "2", "h:1", d, false)
		f.asks(t, "1", "h:1", d, true)
		f.Close()
	})
}

// A commit costs nothing while nobody watches.
func TestCommittedAllocatesNothing(t *testing.T) {
	table := New(Config{})
	table.offer("a")
	name := []byte("a")
	if n := testing.AllocsPerRun(100, func() { table.Committed(space); table.State(space, name) }); n != 0 {
		t.Errorf("%v allocations, want 0", n)
	}
}
