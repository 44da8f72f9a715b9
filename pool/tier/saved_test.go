package tier

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/tier/catalog"
)

// asked counts the entries that are looked for in memory.
type asked struct {
	*dram.Pool
	entries int
}

func (a *asked) Exists(id pool.SpaceID, group uint8, h pool.Hashes, present []bool) {
	a.entries += h.N
	a.Pool.Exists(id, group, h, present)
}

// TestEntrySavedAtOnceIsOfferedOnce commits all shards of blocks in one call. Each block is looked
// for in memory and offered to the tier once.
func TestEntrySavedAtOnceIsOfferedOnce(t *testing.T) {
	const shards, blocks = 4, 5
	m := openMemory(t, 64)
	a := &asked{Pool: m}
	n := openNode(t, m, a, shards, Options{PrefetchBytes: 64 << 10},
		[]Tier{{Name: "shared", Store: pooltest.NewShelf(), Write: OnSave}})
	var slots []pool.Slot
	var status []pool.Status
	for shard := range shards {
		b := n.batch(chain("a", blocks), shard)
		n.Reserve(b)
		for i := range b.Slots {
			key, s := n.key(b, i), &b.Slots[i]
			p := n.arena[s.Off : s.Off+int64(s.Len)]
			content(&key, p)
			s.Sum = pool.Sum(key.Seed(s.Len), p)
		}
		slots, status = append(slots, b.Slots...), append(status, b.Status...)
	}
	n.Commit(slots, n.Epoch(n.space), status)
	if a.entries != blocks {
		t.Errorf("%d entries were looked for, want %d", a.entries, blocks)
	}
	n.stored(0, blocks)
}

// stuck is a disk that answers when it is told to, with an error or without.
type stuck struct {
	asked  chan *catalog.Catalog
	answer chan error
}

func (s *stuck) Read() (*catalog.Catalog, error) { return catalog.New(), nil }

func (s *stuck) Write(k *catalog.Catalog) error {
	s.asked <- k
	return <-s.answer
}

// stuckNode returns a pool whose catalog is on a disk that is stuck.
func stuckNode(t *testing.T, store pool.Store) (*node, *stuck) {
	t.Helper()
	disk := &stuck{asked: make(chan *catalog.Catalog, 1), answer: make(chan error, 1)}
	return newNode(t, 200, 1, Options{file: disk}, Tier{Name: "shared", Store: store, Write: OnSave}), disk
}

// TestOnlyResetsWaitForTheirDisk checks that while a reset waits for its disk other spaces open,
// close and get names, the space itself is served from memory, and no tier is asked for it.
func TestOnlyResetsWaitForTheirDisk(t *testing.T) {
	store := pooltest.NewShelf()
	h := chain("a", 5)
	writer := newNode(t, 64, 1, Options{}, Tier{Name: "shared", Store: store, Write: OnSave})
	writer.save(h)
	writer.stored(0, 5)
	n, disk := stuckNode(t, store)
	if got := n.know(h); got != 5 {
		t.Fatalf("%d of 5 blocks are found before the reset", got)
	}
	other, err := n.OpenSpace(specOf("other", 1))
	check(t, err)
	done := make(chan error, 1)
	go func() {
		_, err := n.ResetSpace(n.space)
		done <- err
	}()
	<-disk.asked
	check(t, n.CloseSpace(other))
	_, err = n.OpenSpace(specOf("third", 1))
	check(t, err)
	if name := n.StoredAs(n.spec.Fingerprint); name == n.spec.Fingerprint {
		t.Error("the space has its old name while it is reset")
	}
	if got := n.know(h); got != 0 {
		t.Errorf("%d blocks of before a reset are found while it is kept", got)
	}
	n.save(chain("memory", 3))
	if got := n.Prefix(n.space, 0, chain("memory", 3)); got != 3 {
		t.Errorf("%d of 3 blocks in memory are found while a reset is kept", got)
	}
	disk.answer <- nil
	check(t, <-done)
	if got := n.know(h) + n.know(chain("memory", 3)); got != 0 {
		t.Errorf("%d blocks of before the reset are found", got)
	}
	n.save(chain("new", 4))
	n.stored(0, 4)
}

// TestResetThatIsNotKept checks that a reset that could not be saved leaves the tiers off, also for
// a space that was opened meanwhile, and that the next one that is saved brings them back.
func TestResetThatIsNotKept(t *testing.T) {
	n, disk := stuckNode(t, pooltest.NewShelf())
	late := specOf("late", 1)
	failed := make(chan error, 1)
	go func() { failed <- n.Forget(late.Fingerprint) }()
	<-disk.asked
	id, err := n.OpenSpace(late)
	check(t, err)
	disk.answer <- errors.New("the disk is gone")
	if <-failed == nil {
		t.Error("a reset that was not kept is acknowledged")
	}
	if now := n.spaces.get(id).now.Load(); !now.off {
		t.Errorf("opened while its reset was not kept, and the tiers are on: %+v", now)
	}
	disk.answer <- nil
	epoch, err := n.ResetSpace(id)
	check(t, err)
	<-disk.asked
	if now := n.spaces.get(id).now.Load(); now.off || now.epoch != epoch || now.stored == late.Fingerprint {
		t.Errorf("after a reset that was kept: %+v, epoch %d", now, epoch)
	}
}

// TestOpenSpaceWhoseResetIsNotKept checks that a reset of an open space that could not be saved is
// an error, since a process killed then would find again what was reset. Memory is reset
// nevertheless, and a second try holds.
func TestOpenSpaceWhoseResetIsNotKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := pooltest.NewShelf()
		disk := &moodyFile{File: catalog.File(filepath.Join(t.TempDir(), "resets"))}
		o := Options{file: disk}
		local := Tier{Name: "disk", Store: store, Local: true, Write: OnSave}
		n := newNode(t, 200, 2, o, local)
		h := chain("a", 10)
		n.save(h)
		n.stored(0, 10)
		disk.fails.Store(true)
		epoch, err := n.ResetSpace(n.space)
		if !errors.Is(err, errMoody) {
			t.Errorf("a reset that is not on disk is acknowledged: %v", err)
		}
		if got := n.know(h); got != 0 || epoch != 2 || n.Epoch(n.space) != 2 {
			t.Errorf("%d blocks of before the reset are found in epoch %d, want none in 2", got, epoch)
		}
		check(t, n.Pool.Close()) // as a kill: nothing more is written
		disk.fails.Store(false)
		n = newNode(t, 200, 2, o, local)
		n.reset()
		if got := n.know(h); got != 0 {
			t.Errorf("%d blocks of before a reset that was tried again are found", got)
		}
	})
}

// TestOpenedAfterAReset checks that a space opened after Forget saved its reset has its new name,
// begins in the epoch that the opener gives, and causes no disk write.
func TestOpenedAfterAReset(t *testing.T) {
	n, disk := stuckNode(t, pooltest.NewShelf())
	late := specOf("late", 1)
	disk.answer <- nil
	check(t, n.Forget(late.Fingerprint))
	<-disk.asked
	late.FirstEpoch = 2
	id, err := n.OpenSpace(late)
	check(t, err)
	if now := n.spaces.get(id).now.Load(); now.epoch != 2 || now.off || now.stored == late.Fingerprint {
		t.Errorf("%+v, want epoch 2 and another name than before the reset", now)
	}
	if len(disk.asked) != 0 {
		t.Error("the disk was asked")
	}
}

// TestDamagedResets checks that a file that cannot be read prevents the start, since a guess could
// find what was reset.
func TestDamagedResets(t *testing.T) {
	m := openMemory(t, 200)
	defer m.Close()
	whole := catalog.New()
	whole.Spaces[pool.Fingerprint{1}] = catalog.Space{Epoch: 7, Claim: catalog.Nonce{2}, Confirmed: []string{"a"},
		Forget: true}
	whole.Floor = 4
	good, err := whole.Encode()
	check(t, err)
	if again, err := catalog.Parse(good); err != nil || !reflect.DeepEqual(again, whole) {
		t.Fatalf("%s is read as %+v, %v", good, again, err)
	}
	damaged := []string{"{", `{"00": "11"}`, `{"` + string(make([]byte, 32)) + `": ""}`, `{"format": 5, "state": {}}`}
	for _, part := range []string{`"epoch": 7`, `"floor": 4`, `"format": 4`, `"state"`, `"spaces"`, "0100", "0200"} {
		text := strings.Replace(string(good), part, part[:len(part)-1]+string(part[len(part)-1]^1), 1)
		if text == string(good) {
			t.Fatalf("%s has no %s", good, part)
		}
		damaged = append(damaged, text)
	}
	for _, text := range append(damaged, string(good[:len(good)/2])) {
		path := filepath.Join(t.TempDir(), "resets")
		check(t, os.WriteFile(path, []byte(text), 0o600))
		if p, err := Open(m, nil, Options{State: path}); err == nil {
			t.Errorf("%q was accepted", text)
			p.Close()
		}
	}
}
