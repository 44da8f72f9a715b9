package tier

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/disk"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/redis"
	"github.com/kvagent/kvagent/pool/remote"
	"github.com/kvagent/kvagent/pool/s3"
	"github.com/kvagent/kvagent/pool/servertest"
)

// count returns the number of shards of blocks that are stored under a name.
func count(t *testing.T, s pool.Store, name pool.Fingerprint, h pool.Hashes) (n int) {
	t.Helper()
	var keys []pool.Key
	for i := range h.N {
		for shard := range uint8(2) {
			keys = append(keys, pool.Key{Space: name, Shard: shard, Hash: pool.MakeHash(h.At(i))})
		}
	}
	status := make([]pool.Status, len(keys))
	check(t, s.Exists(t.Context(), keys, status))
	for _, one := range status {
		if one == pool.OK {
			n++
		}
	}
	return n
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
// one is reset, and they share again under the new name. What was stored before the reset stays in
// the store and on the disk, and no node finds it, also after a restart.
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
	o := Options{State: filepath.Join(dir, "resets"), EpochEvery: 50 * time.Millisecond}
	one := open()
	local, err := disk.Open(disk.Options{Dirs: []disk.Dir{{Path: filepath.Join(dir, "disk"), Bytes: 256 << 20}}})
	check(t, err)
	t.Cleanup(func() { check(t, local.Close()) })
	near := Tier{Name: "disk", Store: local, Local: true, Write: OnSave}
	a := newNode(t, 1000, 2, o, near, far(one))
	b := newNode(t, 1000, 2, Options{EpochEvery: o.EpochEvery}, far(open()))
	old, fresh := chain("old", blocks), chain("fresh", blocks)
	a.save(old)
	a.stored(0, blocks)
	a.stored(1, blocks)
	if got := b.know(old); got != blocks {
		t.Fatalf("%d blocks are shared before the reset, want %d", got, blocks)
	}
	before := a.spec.Fingerprint
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
	check(t, a.Pool.Close())
	again := newNode(t, 1000, 2, o, near, far(one))
	if far, near := count(t, one, before, old), count(t, local, before, old); far != 2*blocks || near != 2*blocks {
		t.Fatalf("%d and %d shards of before the reset are stored, want %d each: the test proves nothing",
			far, near, 2*blocks)
	}
	if got := again.know(old); got != 0 {
		t.Errorf("%d blocks of before the reset are found after a restart", got)
	}
	if got := again.know(fresh); got != blocks {
		t.Errorf("%d blocks of after the reset are found after a restart, want %d", got, blocks)
	}
	if got := count(t, one, again.StoredAs(before), fresh); got != 2*blocks {
		t.Errorf("%d shards under the name in use, want %d", got, 2*blocks)
	}
}
