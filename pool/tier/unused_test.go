package tier

import (
	"context"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/disk"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/servertest"
	"github.com/kvagent/kvagent/pool/tier/catalog"
	"github.com/kvagent/kvagent/pool/tier/names"
)

// hourly are the options of a pool that collects named generations which no node used for an hour.
var hourly = Options{CollectUnused: time.Hour, CollectAfter: time.Minute}

// collected is when hourly has collected one: a period of 16 minutes later, and two scans.
const collected = 90 * time.Minute

// use and leave are an engine of the node's space, of a named generation.
func (n *node) use()   { n.InUse(n.spec.Fingerprint, pool.NamedGeneration) }
func (n *node) leave() { n.NotInUse(n.spec.Fingerprint) }

// onDisk waits until the file names the node's space.
func (n *node) onDisk() {
	n.t.Helper()
	n.waitFor("the space in use is on disk", func(*pool.TierReport) bool {
		k, err := catalog.File(n.o.State).Read()
		return err == nil && k.Spaces[n.spec.Fingerprint].Named
	})
}

// asks waits until the node knows the space's epoch, and with it by which names to ask.
func (n *node) asks() {
	n.t.Helper()
	n.waitFor("the epoch is known", func(*pool.TierReport) bool {
		now := n.spaces.get(n.space).now.Load()
		return now.epoch != 0 && !now.off
	})
}

// saved returns what a node keeps of its space.
func (n *node) saved() (e catalog.Space, there bool) {
	e, there = n.names.Catalog().Spaces[n.spec.Fingerprint]
	return e, there
}

// marksRead is a store that reports when its use marks are read.
type marksRead struct {
	*listing
	read func() error
}

func (m marksRead) Exists(ctx context.Context, keys []pool.Key, status []pool.Status) error {
	if keys[0].Space == pool.UseMarks {
		if err := m.read(); err != nil {
			return err
		}
	}
	return m.listing.Exists(ctx, keys, status)
}

// loseMarks is a store that evicted all use marks.
func (l *listing) loseMarks() {
	_ = l.List(context.Background(), func(k pool.Key, _ int64) bool {
		if k.Space == pool.UseMarks {
			_ = l.Shelf.Delete(context.Background(), []pool.Key{k})
		}
		return true
	})
}

// TestUnusedGenerationsAreCollected checks that a named generation that one node uses stays in the
// shared tier, whatever another node does that has left it; that node's own disk forgets it. When
// neither uses it any more it is collected, not before CollectUnused is over, and nothing is kept
// of it. The base generation stays.
func TestUnusedGenerationsAreCollected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, local := &listing{Shelf: pooltest.NewShelf()}, &listing{Shelf: pooltest.NewShelf()}
		near := Tier{Name: "disk", Store: local, Local: true, Write: OnSave}
		a := newNode(t, 400, 2, hourly, sharing(store))
		b := newNode(t, 400, 2, hourly, near, sharing(store))
		fp := a.spec.Fingerprint
		a.use()
		b.use()
		a.save(chain("a", 10))
		a.stored(0, 10)
		b.save(chain("b", 5))
		b.stored(0, 5)
		b.stored(1, 5)
		base := specOf("base", 2)
		b.InUse(base.Fingerprint, pool.BaseGeneration)
		named, space := b.spec, b.space
		var err error
		b.spec = base
		b.space, err = b.OpenSpace(base)
		check(t, err)
		b.save(chain("base", 3))
		b.stored(1, 8)
		b.NotInUse(base.Fingerprint)
		b.spec, b.space = named, space
		b.leave()
		time.Sleep(time.Hour)
		if got := local.count(fp); got != 10 {
			t.Errorf("%d shards on the disk of a node before CollectUnused is over, want 10", got)
		}
		time.Sleep(10 * time.Hour)
		r := b.Report()
		if got := store.count(fp); got != 30 || r.Names != 0 || r.UsedElsewhere < 2 || r.Tiers[1].Collected != 0 {
			t.Errorf("%d shards of a generation that another node uses are left, want 30; %+v", got, r)
		}
		if got := local.count(fp); got != 0 {
			t.Errorf("%d shards are left on the disk of a node that does not use it", got)
		}
		if got := a.know(chain("b", 5)); got != 5 {
			t.Errorf("%d blocks of the other node are found, want 5", got)
		}
		a.leave()
		time.Sleep(time.Hour)
		if got := store.count(fp); got != 30 {
			t.Errorf("%d shards before no node used it for CollectUnused, want 30", got)
		}
		time.Sleep(2 * collected)
		if got := store.count(fp); got != 0 {
			t.Errorf("%d shards of a generation that no node uses are left", got)
		}
		for _, n := range []*node{a, b} {
			if e, there := n.saved(); there || n.Report().Names != 0 {
				t.Errorf("kept of what was collected: %+v; %+v", e, n.Report())
			}
		}
		if got := store.count(base.Fingerprint) + local.count(base.Fingerprint); got != 12 {
			t.Errorf("%d shards of the base generation are left, want 12", got)
		}
	})
}

// TestUnusedGenerationsWithoutMarks checks that a store that loses the marks of what is in use gets
// them back, also if it loses them between two of its questions or while another node reads them. A
// store whose marks cannot be read is not collected from.
func TestUnusedGenerationsWithoutMarks(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: months of several nodes")
	}
	for name, read := range map[string]func(store *listing) func() error{
		"lost as they are read": func(store *listing) func() error {
			first := true
			return func() error {
				if first {
					store.loseMarks()
				}
				first = !first
				return nil
			}
		},
		"not readable": func(*listing) func() error { return func() error { return errMoody } },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := &listing{Shelf: pooltest.NewShelf()}
				read := read(store)
				a := newNode(t, 200, 2, hourly, sharing(store))
				var left atomic.Bool // from then on b reads marks only to collect
				b := newNode(t, 200, 2, hourly, sharing(marksRead{store, func() error {
					if !left.Load() {
						return nil
					}
					return read()
				}}))
				a.use()
				b.use()
				a.save(chain("a", 10))
				a.stored(0, 10)
				time.Sleep(time.Second)
				left.Store(true)
				b.leave()
				time.Sleep(20 * time.Hour)
				r := b.Report()
				if got := store.count(a.spec.Fingerprint); got != 20 || r.Unused == 0 {
					t.Errorf("%d shards of a generation in use are left, want 20; %+v", got, r)
				}
			})
		})
	}
}

// TestUnusedForSomeNodesAlone checks that nodes whose CollectUnused differ, and one that collects
// nothing, respect what the others use.
func TestUnusedForSomeNodesAlone(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: months of several nodes")
	}
	for name, of := range map[string]time.Duration{"longer": 7 * 24 * time.Hour, "shorter": 10 * time.Minute,
		"never": 0} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := &listing{Shelf: pooltest.NewShelf()}
				a := newNode(t, 200, 2, Options{CollectUnused: of, CollectAfter: time.Minute}, sharing(store))
				b := newNode(t, 200, 2, hourly, sharing(store))
				a.use()
				b.use()
				a.save(chain("a", 10))
				a.stored(0, 10)
				b.leave()
				time.Sleep(30 * time.Hour)
				if got, r := store.count(a.spec.Fingerprint), b.Report(); got != 20 || r.UsedElsewhere == 0 {
					t.Errorf("%d shards of a generation in use are left, want 20; %+v", got, r)
				}
			})
		})
	}
}

// TestUnusedGenerationsAfterARestart checks that a collection goes on after a restart in the
// middle, and begins in a process that starts long after the last use. An engine that is back right
// after the start keeps everything.
func TestUnusedGenerationsAfterARestart(t *testing.T) {
	for name, back := range map[string]bool{"nobody is back": false, "its engine is back": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store, local := &listing{Shelf: pooltest.NewShelf()}, &listing{Shelf: pooltest.NewShelf()}
				near := Tier{Name: "disk", Store: local, Local: true, Write: OnSave}
				o := hourly
				o.State = filepath.Join(t.TempDir(), "resets")
				n := newNode(t, 200, 2, o, near, sharing(store))
				fp := n.spec.Fingerprint
				n.use()
				synctest.Wait()
				n.save(chain("a", 10))
				n.stored(0, 10)
				n.stored(1, 10)
				n.leave()
				store.fails.Store(true)
				local.fails.Store(true)
				time.Sleep(collected)
				if r := n.Report(); r.Names != 1 || r.Tiers[0].CollectFails == 0 || r.Tiers[1].CollectFails == 0 {
					t.Fatalf("nothing is being collected: %+v", r)
				}
				check(t, n.Pool.Close())
				store.fails.Store(false)
				local.fails.Store(false)
				n = newNode(t, 200, 2, o, near, sharing(store))
				if r := n.Report(); r.Names != 1 {
					t.Errorf("the next process has forgotten what it has to collect: %+v", r)
				}
				if back {
					time.Sleep(30 * time.Second)
					n.use()
				}
				time.Sleep(10 * time.Minute)
				want := 0
				if back {
					want = 20
				}
				if far, near := store.count(fp), local.count(fp); far != want || near != want || n.Report().Names != 0 {
					t.Errorf("%d shards in the store and %d on the disk, want %d; %+v", far, near, want, n.Report())
				}
				n.save(chain("b", 5))
				time.Sleep(time.Minute)
				if got := store.count(fp); back && got != 30 {
					t.Errorf("%d shards of an engine that is back, want 30", got)
				}
				check(t, n.Pool.Close())
				time.Sleep(24 * time.Hour)
				n = newNode(t, 200, 2, o, near, sharing(store))
				time.Sleep(10 * time.Minute)
				if _, there := n.saved(); there || store.count(fp)+local.count(fp) != 0 {
					t.Errorf("%d shards are left a day after the last use", store.count(fp)+local.count(fp))
				}
			})
		})
	}
}

// TestUnusedGenerationIsUsedInTheMiddle checks that a collection ends at once when another node
// begins to use the space.
func TestUnusedGenerationIsUsedInTheMiddle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &listing{Shelf: pooltest.NewShelf()}
		o := hourly
		o.CollectRate = 1
		a := newNode(t, 600, 2, o, sharing(store))
		a.use()
		a.save(chain("a", 200))
		a.stored(0, 200)
		a.leave()
		for store.count(a.spec.Fingerprint) == 400 {
			time.Sleep(time.Second)
		}
		b := newNode(t, 600, 2, hourly, sharing(store))
		b.use()
		time.Sleep(20 * time.Minute)
		left := store.count(a.spec.Fingerprint)
		if left < 300 || a.Report().Names != 0 || a.Report().UsedElsewhere != 1 {
			t.Errorf("%d of 400 shards are left that another node uses again; %+v", left, a.Report())
		}
		b.save(chain("b", 10))
		b.stored(0, 10)
		time.Sleep(3 * time.Hour)
		if got := store.count(a.spec.Fingerprint); got != left+20 {
			t.Errorf("%d shards are left later, want %d", got, left+20)
		}
	})
}

// TestUnusedGenerationComesBack checks that a generation that comes back after it was collected on
// one node, and that another node still has in its file with an epoch, is shared again: in either
// order, and without either file.
func TestUnusedGenerationComesBack(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: months of several nodes")
	}
	for name, c := range map[string]struct{ first, loses bool }{
		"collector first": {first: true}, "the other first": {}, "the other lost its file": {loses: true},
	} {
		t.Run(name, func(t *testing.T) {
			if testing.Short() && !c.first {
				t.Skip("SKIPPED: long, a month of each node's time")
			}
			synctest.Test(t, func(t *testing.T) {
				store := &listing{Shelf: pooltest.NewShelf()}
				ob := hourly
				ob.State = filepath.Join(t.TempDir(), "resets")
				a := newNode(t, 400, 2, hourly, sharing(store))
				b := newNode(t, 400, 2, ob, sharing(store))
				fp := a.spec.Fingerprint
				a.use()
				b.use()
				a.reset()
				a.reset()
				a.reset()
				time.Sleep(2 * names.FullRound * a.o.EpochEvery)
				if a.epoch() != 3 || b.epoch() != 3 {
					t.Fatalf("epochs %d and %d", a.epoch(), b.epoch())
				}
				a.save(chain("old", 10))
				a.stored(0, 10)
				check(t, b.Pool.Close())
				a.leave()
				check(t, a.CloseSpace(a.space))
				time.Sleep(30 * 24 * time.Hour)
				if e, there := a.saved(); there || store.count(catalog.StoredName(fp, 3)) != 0 ||
					store.count(pool.EpochMarkers) != 0 {
					t.Fatalf("not collected: %+v, %d markers", e, store.count(pool.EpochMarkers))
				}
				if c.loses {
					ob.State = ""
				}
				again := func() {
					var err error
					a.space, err = a.OpenSpace(a.spec)
					check(t, err)
					a.use()
				}
				if c.first {
					again()
					time.Sleep(time.Minute)
					a.save(chain("a", 5))
					a.stored(0, 15)
				}
				b = newNode(t, 400, 2, ob, sharing(store))
				b.use()
				if !c.first {
					time.Sleep(time.Minute)
					again()
				}
				time.Sleep(2 * names.FullRound * a.o.EpochEvery)
				if a.epoch() != b.epoch() {
					t.Errorf("epochs %d and %d", a.epoch(), b.epoch())
				}
				if got := a.know(chain("old", 10)) + b.know(chain("old", 10)); got != 0 {
					t.Errorf("%d blocks are found of what was collected", got)
				}
				before := a.Report().Tiers[0].Stored
				a.save(chain("new", 10))
				a.stored(0, before+10)
				b.save(chain("of b", 10))
				b.stored(0, 10)
				if got := b.know(chain("new", 10)) + a.know(chain("of b", 10)); got != 20 {
					t.Errorf("%d blocks are shared, want 20", got)
				}
			})
		})
	}
}

// TestUseMarksAreCollected checks that use marks are few however long a space is used, and end some
// time after the last use, although the node was started again. It looks at those of 4 and of 16
// minutes.
func TestUseMarksAreCollected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &listing{Shelf: pooltest.NewShelf()}
		o := Options{CollectUnused: 10 * time.Minute, State: filepath.Join(t.TempDir(), "resets")}
		marks := func() (n int) {
			check(t, store.List(t.Context(), func(k pool.Key, _ int64) bool {
				if k.Space == pool.UseMarks && k.Hash.Bytes[17] < 2 {
					n++
				}
				return true
			}))
			return n
		}
		n := newNode(t, 200, 2, o, sharing(store))
		n.use()
		time.Sleep(5 * time.Hour)
		// of each length, and of a node's own once more, 9 to 11 periods: older marks are stale
		if got := marks(); got > 3*11 || got < 3*9 {
			t.Errorf("%d use marks after 5 hours", got)
		}
		check(t, n.Pool.Close())
		newNode(t, 200, 2, o, sharing(store))
		time.Sleep(4 * time.Hour)
		if got := marks(); got != 0 {
			t.Errorf("%d use marks are left 4 hours after the last use", got)
		}
	})
}

// TestUnusedGenerationsAreBounded checks that what is kept of named spaces is bounded: the one that
// was used least recently makes room, which is counted and logged, and only so many are abandoned
// at a time.
func TestUnusedGenerationsAreBounded(t *testing.T) {
	if testing.Short() {
		t.Skip("SKIPPED: long, as many spaces as a catalog has")
	}
	synctest.Test(t, func(t *testing.T) {
		var said atomic.Int32
		o := Options{CollectUnused: 100 * time.Hour, EpochEvery: time.Hour, CollectAfter: 2 * time.Hour}
		o.Log = func(_, what string, _ error) {
			if strings.Contains(what, "the catalog is full") {
				said.Add(1)
			}
		}
		full := catalog.New()
		for i := range catalog.MaxSpaces {
			fp := pool.Fingerprint{1, byte(i), byte(i >> 8), byte(i >> 16)}
			full.Spaces[fp] = catalog.Space{Named: true, Used: time.Now().Unix() + int64(i)/1000}
		}
		o.file = givenFile{full}
		n := newNode(t, 64, 1, o, sharing(&listing{Shelf: pooltest.NewShelf()}))
		n.use()
		time.Sleep(2 * time.Hour)
		got, lost := len(n.names.Catalog().Spaces), n.Report().Lost
		if got != catalog.MaxSpaces || lost != 1 || said.Load() != 1 {
			t.Errorf("%d spaces are kept, %d lost, said %d times", got, lost, said.Load())
		}
		time.Sleep(117 * time.Hour)
		if r := n.Report(); r.Names != catalog.MaxOrphans/2 || r.Lost != 1 {
			t.Errorf("%d names are to be collected, %d are lost, want %d and 1", r.Names, r.Lost, catalog.MaxOrphans/2)
		}
	})
}

// TestCollectUnusedIsChecked checks the range of CollectUnused.
func TestCollectUnusedIsChecked(t *testing.T) {
	for _, o := range []Options{
		{CollectUnused: 9 * time.Minute}, {CollectUnused: 91 * 24 * time.Hour}, {CollectUnused: -1},
		{CollectUnused: 10 * time.Minute, EpochEvery: 10 * time.Second},
	} {
		if err := o.completeEpochs(); err == nil || !strings.Contains(err.Error(), "CollectUnused is") ||
			!strings.Contains(err.Error(), "allowed: 0, or ") {
			t.Errorf("%v every %v: %v", o.CollectUnused, o.EpochEvery, err)
		}
	}
	check(t, (&Options{}).completeEpochs())
	check(t, (&Options{CollectUnused: MaxCollectUnused}).completeEpochs())
}

// TestUnusedGenerationsOverRealStores checks, over a real Redis and a real S3 service, that what
// one of two nodes uses stays, and that what neither uses is collected although the node is started
// again in the middle of it. Then the nodes share again.
func TestUnusedGenerationsOverRealStores(t *testing.T) {
	for _, kind := range []string{"redis", "s3"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			var server *servertest.Server
			if kind == "redis" {
				server = servertest.Redis(t)
			} else {
				server = servertest.S3(t, "blocks")
			}
			unusedOver(t, func() pool.Store { return realStore(t, kind, server) })
		})
	}
}

func unusedOver(t *testing.T, open func() pool.Store) {
	const blocks = 100
	dir := t.TempDir()
	far := func(s pool.Store) Tier {
		return Tier{
			Name: "shared", Store: s, Write: OnSave, AskWithin: patience, PutWithin: patience, FetchWithin: patience,
			BreakAfter: 1000,
		}
	}
	var later atomic.Int64 // of both clocks
	o := Options{
		State:      filepath.Join(dir, "resets"),
		Clock:      func() time.Time { return time.Now().Add(time.Duration(later.Load())) },
		EpochEvery: 50 * time.Millisecond, CollectAfter: 200 * time.Millisecond, CollectRate: 100,
		CollectUnused: time.Hour,
	}
	one := open()
	local, err := disk.Open(disk.Options{Dirs: []disk.Dir{{Path: filepath.Join(dir, "disk"), Bytes: 256 << 20}}})
	check(t, err)
	t.Cleanup(func() { check(t, local.Close()) })
	near := Tier{Name: "disk", Store: local, Local: true, Write: OnSave}
	ob := o
	ob.State, ob.CollectRate = "", 0
	a, b := newNode(t, 1000, 2, o, near, far(one)), newNode(t, 1000, 2, ob, far(open()))
	fp := a.spec.Fingerprint
	a.use()
	b.use()
	a.onDisk()
	a.save(chain("a", blocks))
	a.stored(0, blocks)
	a.stored(1, blocks)
	b.asks()
	if got := b.know(chain("a", blocks)); got != blocks {
		t.Fatalf("%d blocks are shared, want %d", got, blocks)
	}
	b.leave()
	later.Add(int64(3 * time.Hour))
	a.waitFor("its mark is put", func(*pool.TierReport) bool {
		mark, status := catalog.UseKeys(fp, o.CollectUnused, o.Clock().Unix())[:1], []pool.Status{0}
		check(t, one.Exists(t.Context(), mark, status))
		return status[0] == pool.OK
	})
	b.waitFor("it is used elsewhere", func(r *pool.TierReport) bool { return r.UsedElsewhere > 0 && r.Names == 0 })
	if got := countIn(one.(pool.Lister), fp); got != 2*blocks {
		t.Errorf("%d shards of what one node uses are left, want %d", got, 2*blocks)
	}
	check(t, b.Pool.Close())
	a.leave()
	later.Add(int64(3 * time.Hour))
	a.waitFor("collecting is under way", func(r *pool.TierReport) bool { return r.Tiers[0].Collected > 0 })
	check(t, a.Pool.Close())
	if got := countIn(one.(pool.Lister), fp) + countIn(local, fp); got == 0 {
		t.Fatal("everything was collected before the node was ended: the test proves nothing")
	}
	o.CollectRate = 0
	again := newNode(t, 1000, 2, o, near, far(one))
	again.waitFor("all is collected", func(r *pool.TierReport) bool {
		_, there := again.saved()
		return r.Names == 0 && !there
	})
	if far, near := countIn(one.(pool.Lister), fp), countIn(local, fp); far+near != 0 {
		t.Errorf("%d shards are left in the store and %d on the disk", far, near)
	}
	b = newNode(t, 1000, 2, ob, far(open()))
	again.use()
	again.onDisk()
	b.use()
	b.save(chain("b", blocks))
	b.stored(0, blocks)
	again.asks()
	if got := again.know(chain("b", blocks)); got != blocks {
		t.Errorf("%d blocks are shared when it is back, want %d", got, blocks)
	}
}
