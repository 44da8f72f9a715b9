package tier

import (
	"context"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/disk"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/redis"
	"github.com/kvagent/kvagent/pool/remote"
	"github.com/kvagent/kvagent/pool/s3"
	"github.com/kvagent/kvagent/pool/servertest"
	"github.com/kvagent/kvagent/pool/tier/catalog"
)

// listing is a shelf whose Delete may fail.
type listing struct {
	*pooltest.Shelf
	fails atomic.Bool
}

func (l *listing) Delete(ctx context.Context, keys []pool.Key) error {
	if l.fails.Load() {
		return errMoody
	}
	return l.Shelf.Delete(ctx, keys)
}

// count returns the number of values under a name.
func (l *listing) count(name pool.Fingerprint) int { return countIn(l, name) }

func countIn(l pool.Lister, name pool.Fingerprint) (n int) {
	_ = l.List(context.Background(), func(k pool.Key, _ int64) bool {
		if k.Space == name {
			n++
		}
		return true
	})
	return n
}

// TestOrphansAreCollected checks that orphans of a reset are collected after CollectAfter, and once
// more for late writes of another node; not before, and nothing else.
func TestOrphansAreCollected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &listing{Shelf: pooltest.NewShelf()}
		n := newNode(t, 200, 2, Options{}, sharing(store))
		old, fresh := n.spec.Fingerprint, catalog.StoredName(n.spec.Fingerprint, 1)
		n.save(chain("a", 10))
		n.stored(0, 10)
		n.reset()
		n.save(chain("b", 5))
		n.stored(0, 15)
		time.Sleep(n.o.CollectAfter - time.Second)
		if got := store.count(old); got != 20 || n.Report().Tiers[0].Collecting != 1 {
			t.Errorf("%d shards under the old name before other nodes had their time, want 20; %+v", got, n.Report())
		}
		time.Sleep(2*time.Second + n.o.EpochEvery)
		if got := store.count(old); got != 0 {
			t.Errorf("%d shards are left under the old name", got)
		}
		late := []pool.Item{{Key: pool.Key{Space: old, Hash: pool.MakeHash([]byte{9})}, Data: []byte("late")}}
		check(t, store.Put(t.Context(), late))
		time.Sleep(n.o.CollectAfter + n.o.EpochEvery)
		r := n.Report()
		if got := store.count(old); got+r.Names != 0 || r.Tiers[0].Collected != 21 || r.Tiers[0].CollectFails != 0 {
			t.Errorf("%d shards that were written late are left; %+v", got, r)
		}
		if got := store.count(fresh); got != 10 {
			t.Errorf("%d shards are under the name in use, want 10", got)
		}
		if got := n.know(chain("b", 5)); got != 5 {
			t.Errorf("%d blocks of after the reset are found, want 5", got)
		}
	})
}

// TestCollectingIsTriedAgain checks that collection tries again after a store failed, and forgets
// nothing.
func TestCollectingIsTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &listing{Shelf: pooltest.NewShelf()}
		store.fails.Store(true)
		n := newNode(t, 200, 2, Options{}, sharing(store))
		n.save(chain("a", 10))
		n.stored(0, 10)
		n.reset()
		time.Sleep(3 * n.o.CollectAfter)
		if r := n.Report(); r.Names != 1 || r.Tiers[0].CollectFails == 0 || store.count(n.spec.Fingerprint) != 20 {
			t.Errorf("%+v", r)
		}
		store.fails.Store(false)
		time.Sleep(3 * n.o.CollectAfter)
		if r := n.Report(); r.Names != 0 || store.count(n.spec.Fingerprint) != 0 {
			t.Errorf("%d shards are left; %+v", store.count(n.spec.Fingerprint), r)
		}
	})
}

// TestPrivateSpacesAreCollected checks that a private space is collected when its engine has been
// disconnected for CollectAfter, also across a restart of the agent. A space whose engine returns
// before that keeps everything, and so does a space that is not private.
func TestPrivateSpacesAreCollected(t *testing.T) {
	for name, restarted := range map[string]bool{"one process": false, "restarted": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { collectPrivate(t, restarted) })
		})
	}
}

func collectPrivate(t *testing.T, restarted bool) {
	store := &listing{Shelf: pooltest.NewShelf()}
	state := filepath.Join(t.TempDir(), "resets")
	o := Options{State: state}
	n := newNode(t, 400, 2, o, sharing(store))
	private, named := specOf("private", 2), n.spec
	n.InUse(named.Fingerprint, pool.BaseGeneration)
	n.InUse(private.Fingerprint, pool.PrivateGeneration)
	var err error
	shared := n.space
	n.spec = private
	n.space, err = n.OpenSpace(private)
	check(t, err)
	synctest.Wait() // it is on disk, and has tiers
	if k, err := catalog.File(state).Read(); err != nil || !k.Spaces[private.Fingerprint].Private {
		t.Fatalf("kept: %+v, %v", k, err)
	}
	n.save(chain("a", 10))
	n.stored(0, 10)
	n.NotInUse(private.Fingerprint)
	time.Sleep(n.o.CollectAfter - time.Second)
	n.InUse(private.Fingerprint, pool.PrivateGeneration)
	time.Sleep(3 * n.o.CollectAfter)
	if got := store.count(private.Fingerprint); got != 20 {
		t.Fatalf("%d shards of an engine that came back in time, want 20", got)
	}
	n.spec, n.space = named, shared
	n.save(chain("b", 4))
	n.stored(0, 14)
	n.NotInUse(named.Fingerprint)
	if restarted {
		check(t, n.Pool.Close())
		n = newNode(t, 400, 2, o, sharing(store))
		time.Sleep(n.o.CollectAfter - time.Second)
		if got := store.count(private.Fingerprint); got != 20 {
			t.Fatalf("%d shards before CollectAfter of the new process is over, want 20", got)
		}
	} else {
		n.NotInUse(private.Fingerprint)
	}
	time.Sleep(2*n.o.CollectAfter + 3*n.o.EpochEvery)
	if got := store.count(private.Fingerprint); got != 0 || n.Report().Names != 0 {
		t.Errorf("%d shards of a private space without an engine are left; %+v", got, n.Report())
	}
	if got := store.count(named.Fingerprint); got != 8 {
		t.Errorf("%d shards of a space that is not private are left, want 8", got)
	}
	if k, err := catalog.File(state).Read(); err != nil || len(k.Spaces)+len(k.Orphans) != 0 {
		t.Errorf("kept: %+v, %v", k, err)
	}
	n.InUse(private.Fingerprint, pool.PrivateGeneration) // later: only misses
	n.spec = private
	n.space, err = n.OpenSpace(private)
	check(t, err)
	synctest.Wait()
	if got := n.know(chain("a", 10)); restarted && got > 0 { // else memory has them
		t.Errorf("%d blocks found of what was collected", got)
	}
	before := n.Report().Tiers[0].Stored
	n.save(chain("c", 3))
	n.stored(0, before+3)
}

// realStore connects to a store on a real server.
func realStore(t *testing.T, kind string, server *servertest.Server) pool.Store {
	t.Helper()
	var s interface {
		pool.Store
		State() remote.State
		Close() error
	}
	var err error
	switch kind {
	case "redis":
		s, err = redis.Open(redis.Options{Addresses: []string{server.Addr}})
	case "s3":
		s, err = s3.Open(s3.Options{
			Endpoint: server.Addr, Insecure: true, PathStyle: true, Region: "us-east-1", Bucket: "blocks",
			AccessKey: servertest.S3AccessKey, SecretKey: servertest.S3SecretKey,
		})
	}
	check(t, err)
	t.Cleanup(func() { check(t, s.Close()) })
	pooltest.Until(t, "the store is connected", func() bool { return s.State() == remote.OK })
	return s
}

// TestResetOverRealStores uses a real Redis and a real S3 service, with a disk: two nodes share,
// one is reset, they share again under the new name, and the old keys are deleted from the store
// and the disk, although the node restarts during the collection.
func TestResetOverRealStores(t *testing.T) {
	for _, kind := range []string{"redis", "s3"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			var server *servertest.Server
			if kind == "redis" {
				server = servertest.Redis(t)
			} else {
				server = servertest.S3(t, "blocks")
			}
			resetOver(t, func() pool.Store { return realStore(t, kind, server) })
		})
	}
}

func resetOver(t *testing.T, open func() pool.Store) {
	const blocks = 100
	dir := t.TempDir()
	far := func(s pool.Store) Tier {
		return Tier{
			Name: "shared", Store: s, Write: OnSave, AskWithin: patience, PutWithin: patience, FetchWithin: patience,
			BreakAfter: 1000,
		}
	}
	o := Options{
		State:      filepath.Join(dir, "resets"),
		EpochEvery: 50 * time.Millisecond, CollectAfter: 200 * time.Millisecond, CollectRate: 20,
	}
	one := open()
	local, err := disk.Open(disk.Options{Dirs: []disk.Dir{{Path: filepath.Join(dir, "disk"), Bytes: 256 << 20}}})
	check(t, err)
	t.Cleanup(func() { check(t, local.Close()) })
	near := Tier{Name: "disk", Store: local, Local: true, Write: OnSave}
	a := newNode(t, 1000, 2, o, near, far(one))
	b := newNode(t, 1000, 2, Options{EpochEvery: o.EpochEvery, CollectAfter: time.Hour}, far(open()))
	old, fresh := chain("old", blocks), chain("fresh", blocks)
	a.save(old)
	a.stored(0, blocks)
	a.stored(1, blocks)
	if got := b.know(old); got != blocks {
		t.Fatalf("%d blocks are shared before the reset, want %d", got, blocks)
	}
	before := a.spec.Fingerprint
	if got := countIn(one.(pool.Lister), before); got != 2*blocks {
		t.Fatalf("%d shards under the name before the reset, want %d", got, 2*blocks)
	}
	a.reset()
	if got := a.know(old); got != 0 {
		t.Errorf("%d blocks of before the reset are found by its own node", got)
	}
	b.waitFor("the other node hears of the reset", func(r *pool.TierReport) bool { return r.Adopted == 1 })
	if got := b.know(old); got != 0 {
		t.Errorf("%d blocks of before the reset are found by the other node", got)
	}
	b.save(fresh)
	b.stored(0, blocks)
	if got := a.know(fresh); got != blocks {
		t.Errorf("%d blocks are shared after the reset, want %d", got, blocks)
	}
	a.waitFor("collecting is under way", func(r *pool.TierReport) bool { // either may come due first
		return r.Tiers[0].Collected+r.Tiers[1].Collected > 0
	})
	check(t, a.Pool.Close())
	if got := countIn(one.(pool.Lister), before) + countIn(local, before); got == 0 {
		t.Fatal("everything was collected before the node was ended: the test proves nothing")
	}
	o.CollectRate = 0
	again := newNode(t, 1000, 2, o, near, far(one))
	again.waitFor("all is collected", func(r *pool.TierReport) bool { return r.Names == 0 })
	if far, near := countIn(one.(pool.Lister), before), countIn(local, before); far+near != 0 {
		t.Errorf("%d shards are left in the store and %d on the disk under the name of before the reset", far, near)
	}
	if got := again.know(fresh); got != blocks {
		t.Errorf("%d blocks of after the reset are found when the old ones are collected, want %d", got, blocks)
	}
	if got := countIn(one.(pool.Lister), again.StoredAs(before)); got != 2*blocks {
		t.Errorf("%d shards under the name in use, want %d", got, 2*blocks)
	}
}

// TestPrivateSpaceIsBackInTheMiddle checks that an engine that returns while its private space is
// being collected finds the rest, and loses nothing more.
func TestPrivateSpaceIsBackInTheMiddle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &listing{Shelf: pooltest.NewShelf()}
		n := newNode(t, 400, 2, Options{}, sharing(store))
		n.InUse(n.spec.Fingerprint, pool.PrivateGeneration)
		n.save(chain("a", 10))
		n.stored(0, 10)
		n.NotInUse(n.spec.Fingerprint)
		store.fails.Store(true)
		time.Sleep(n.o.CollectAfter + 3*n.o.EpochEvery)
		if r := n.Report(); r.Names != 1 || r.Tiers[0].CollectFails == 0 {
			t.Fatalf("it is not being collected: %+v", r)
		}
		n.save(chain("b", 5)) // not used: memory has it, and the tier does not get it
		time.Sleep(time.Second)
		n.InUse(n.spec.Fingerprint, pool.PrivateGeneration)
		store.fails.Store(false)
		n.save(chain("c", 5))
		n.stored(0, 15)
		time.Sleep(5 * n.o.CollectAfter)
		r, got := n.Report(), store.count(n.spec.Fingerprint)
		if got != 30 || r.Names != 0 || r.Tiers[0].Collected != 0 {
			t.Errorf("%d shards of an engine that is back, want 30; %+v", got, r)
		}
	})
}

// TestPrivateSpaceIsOnDiskFirst checks that nothing of a private space is stored before the file
// has its name, so that it is collected even if the process dies.
func TestPrivateSpaceIsOnDiskFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &listing{Shelf: pooltest.NewShelf()}
		disk := &moodyFile{File: catalog.File(filepath.Join(t.TempDir(), "resets"))}
		disk.fails.Store(true)
		n := newNode(t, 400, 2, Options{file: disk}, sharing(store))
		private := specOf("private", 2)
		n.InUse(private.Fingerprint, pool.PrivateGeneration)
		var err error
		n.spec = private
		n.space, err = n.OpenSpace(private)
		check(t, err)
		time.Sleep(2 * n.o.EpochEvery)
		n.save(chain("a", 10))
		time.Sleep(time.Second)
		if got := store.count(private.Fingerprint); got != 0 {
			t.Errorf("%d shards are stored of a private space that the file does not name", got)
		}
		disk.fails.Store(false)
		time.Sleep(2 * n.o.EpochEvery)
		n.stored(0, 10) // they waited for it
		n.save(chain("b", 5))
		n.stored(0, 15)
	})
}
