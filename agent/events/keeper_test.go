package events

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/lookup"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// lasting is a pool that outlives the desks of a test.
type lasting struct {
	t    *testing.T
	pool *dram.Pool
	path string
	desk *Desk
}

func newLasting(t *testing.T) *lasting {
	p, err := dram.Open(dram.Options{Bytes: 1 << 20, SlabBytes: 4 << 10, Virtual: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return &lasting{t: t, pool: p, path: filepath.Join(t.TempDir(), "tokens")}
}

// open opens a space of the pool; a name has one.
func (l *lasting) open(name byte) *lookup.Space {
	id, err := l.pool.OpenSpace(pool.Spec{
		Fingerprint: pool.Fingerprint{name}, Identity: []byte{name}, Shards: 1,
		Groups: []pool.Group{{BlockTokens: blockTokens, ShardBytes: []uint32{1024}}},
	})
	if err != nil {
		l.t.Fatal(err)
	}
	return &lookup.Space{ID: id, Print: pool.Fingerprint{name}, Groups: []lookup.Group{{BlockTokens: blockTokens}}}
}

// begin begins a desk, as a new process does.
func (l *lasting) begin() {
	l.end()
	l.desk = New(l.pool, nil, l.path, zap.NewNop())
	l.t.Cleanup(l.end)
}

func (l *lasting) end() {
	if l.desk != nil {
		l.desk.Close()
		l.desk = nil
	}
}

// say stores and says a prompt.
func (l *lasting) say(rules *lookup.Space, n int) {
	l.store(rules, n)
	l.tokens(rules, n)
}

func (l *lasting) store(rules *lookup.Space, n int) {
	c := chain(n)
	b := pool.Batch{
		Space: rules.ID, Epoch: l.pool.Epoch(rules.ID), Hashes: c, Status: make([]pool.Status, c.N),
		Slots: make([]pool.Slot, c.N),
	}
	l.pool.Reserve(&b)
	slots, status := b.Slots[:0], b.Status[:0]
	for i, s := range b.Status {
		if s == pool.OK {
			slots, status = append(slots, b.Slots[i]), append(status, s)
		}
	}
	l.pool.Commit(slots, b.Epoch, status)
}

func (l *lasting) tokens(rules *lookup.Space, n int) {
	c := chain(n)
	var parent []byte
	for i := range c.N {
		l.desk.Serve(1, rules, &ipc.BlockTokens{
			Parent: parent, HashLen: 8, Hashes: c.At(i), Tokens: tokensOf(c.At(i)), Extra: extraOf(c.At(i)),
		}, 0, nil)
		parent = c.At(i)
	}
}

// follow begins to be told of a space.
func (l *lasting) follow(session uint64, rules *lookup.Space) *view {
	v := &view{
		t: l.t, name: fmt.Sprint("session ", session), stored: map[string]ipc.EventRun{}, in: map[string]held{},
		most: ipc.MaxEventBlocks,
	}
	l.ask(session, rules, v)
	return v
}

func (l *lasting) ask(session uint64, rules *lookup.Space, v *view) {
	l.desk.Serve(session, rules, &ipc.NextEvents{Blocks: ipc.MaxEventBlocks}, 0, v.receive)
}

// until waits until a new session is told as many blocks, with their tokens.
func (l *lasting) until(what string, rules *lookup.Space, blocks int) {
	l.t.Helper()
	session := uint64(1000)
	pooltest.Until(l.t, what, func() bool {
		session++
		v := l.follow(session, rules)
		l.desk.Leave(session)
		for h, one := range v.stored {
			if !bytes.Equal(one.Tokens, tokensOf([]byte(h))) || !bytes.Equal(one.Extra, extraOf([]byte(h))) {
				l.t.Fatalf("block %x: tokens %v, extra %v", h, one.Tokens, one.Extra)
			}
		}
		return len(v.stored) == blocks
	})
}

// count returns how many blocks of each space are in the file.
func (l *lasting) count() (all map[byte]int) {
	all = map[byte]int{}
	for name := range byte('z') {
		f, err := os.Open(l.file(name))
		if err != nil {
			continue
		}
		if _, err := readRecords(f, func(m *ipc.BlockTokens) { all[name] += len(m.Hashes) / 8 }); err != nil {
			l.t.Fatal(err)
		}
		f.Close()
	}
	return all
}

// file returns the path of a space's file.
func (l *lasting) file(name byte) string {
	return filepath.Join(l.path, nameOf(pool.Fingerprint{name}))
}

// anew has the file of a space made anew.
func (l *lasting) anew(rules *lookup.Space) {
	l.desk.mu.Lock()
	l.desk.spaces[rules.ID].renew()
	l.desk.mu.Unlock()
	l.desk.keeper.signal()
}

// TestTokensOutliveTheDesk: what one desk was told, the next one tells, of spaces that are opened
// again, also if the file was cut off or damaged at its end; and it goes on with the file.
func TestTokensOutliveTheDesk(t *testing.T) {
	l := newLasting(t)
	a, b := l.open('a'), l.open('b')
	l.begin()
	if _, err := os.Stat(l.path); err == nil {
		t.Error("there is a folder while nobody asks for events")
	}
	l.follow(1, a)
	l.follow(1, b)
	l.say(a, 0)
	l.say(a, 2)
	l.say(b, 4)
	l.until("all is told", a, 2*chainBlocks)
	l.begin()
	l.until("the next desk tells all", a, 2*chainBlocks)
	l.say(a, 6)
	l.until("and what is new", a, 3*chainBlocks)
	l.begin()
	l.until("as does the one after it", a, 3*chainBlocks)
	l.until("of another space too", b, chainBlocks)
	l.end()

	whole, err := os.ReadFile(l.file('a'))
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(l.path); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("%v, %v: want a folder of the owner's alone", info.Mode(), err)
	}
	for name, damaged := range map[string][]byte{
		"cut off": whole[:len(whole)-3],
		"damaged": flipped(whole, len(whole)-9),
	} {
		if err := os.WriteFile(l.file('a'), damaged, 0o600); err != nil {
			t.Fatal(err)
		}
		kept := l.count()['a']
		if kept >= 3*chainBlocks || kept < 2*chainBlocks {
			t.Errorf("%s: %d blocks are whole", name, kept)
		}
		l.begin()
		l.until(name+": all but the last record", a, kept)
		l.say(a, 6)
		l.until(name+": the last block is said again", a, 3*chainBlocks)
		l.begin()
		l.until(name+": and kept", a, 3*chainBlocks)
		l.end()
	}
	if err := os.WriteFile(l.file('a'), []byte("something else"), 0o600); err != nil {
		t.Fatal(err)
	}
	l.begin()
	l.follow(1, a)
	l.say(a, 0)
	l.begin()
	l.until("a file of another kind is replaced", a, chainBlocks)
}

// flipped returns data with another byte at a place.
func flipped(data []byte, at int) []byte {
	data = bytes.Clone(data)
	data[at] ^= 0xff
	return data
}

// TestFileIsMadeAnew when a space was reset, or when it is too large: with what is held alone, and
// with what comes to be held meanwhile.
func TestFileIsMadeAnew(t *testing.T) {
	l := newLasting(t)
	a, b := l.open('a'), l.open('b')
	l.begin()
	l.follow(1, a)
	l.follow(1, b)
	l.say(b, 0)
	l.until("b is told", b, chainBlocks)
	l.begin() // b is not asked for any more
	l.follow(1, a)
	l.say(a, 2)
	pooltest.Until(t, "a is kept", func() bool { return l.count()['a'] == chainBlocks })
	if _, err := l.pool.ResetSpace(a.ID); err != nil {
		t.Fatal(err)
	}
	pooltest.Until(t, "nothing of what was reset is in the file", func() bool {
		got := l.count()
		return got['a'] == 0 && got['b'] == chainBlocks
	})
	l.say(a, 4)
	pooltest.Until(t, "a is kept", func() bool { return l.count()['a'] == chainBlocks })
	l.tokens(a, 8) // before it is stored
	before, err := os.Stat(l.file('a'))
	if err != nil {
		t.Fatal(err)
	}
	l.anew(a)
	pooltest.Until(t, "the file is made anew", func() bool {
		now, err := os.Stat(l.file('a'))
		return err == nil && !os.SameFile(before, now)
	})
	if before, err = os.Stat(l.file('a')); err != nil {
		t.Fatal(err)
	}
	l.store(a, 8)
	l.until("a is told", a, 2*chainBlocks)
	pooltest.Until(t, "all of it is in the file", func() bool { return l.count()['a'] == 2*chainBlocks })
	if now, err := os.Stat(l.file('a')); err != nil || !os.SameFile(before, now) {
		t.Errorf("the file was made anew for what is held now, and can be appended: %v", err)
	}
	l.begin()
	l.until("what was said again after the reset, or stored after the file was made, is told", a, 2*chainBlocks)
	l.until("b is told", b, chainBlocks)
}

// TestFileThatCannotBeWritten costs what it would have kept, and is counted.
func TestFileThatCannotBeWritten(t *testing.T) {
	l := newLasting(t)
	l.path = filepath.Join(l.path, "no", "such", "folder")
	a := l.open('a')
	l.begin()
	l.follow(1, a)
	l.say(a, 0)
	l.until("all is told", a, chainBlocks)
	pooltest.Until(t, "failures are counted", func() bool { return l.desk.Report().FileErrors > 0 })
}

// TestFileIsWrittenOnceItCanBe: what could not be written, or made anew after a reset, is later.
func TestFileIsWrittenOnceItCanBe(t *testing.T) {
	l := newLasting(t)
	folder := filepath.Join(filepath.Dir(l.path), "later")
	l.path = filepath.Join(folder, "tokens")
	a := l.open('a')
	l.begin()
	l.follow(1, a)
	l.say(a, 0)
	pooltest.Until(t, "failures are counted", func() bool { return l.desk.Report().FileErrors > 0 })
	if err := os.Mkdir(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	l.begin()
	l.until("the next desk tells all", a, chainBlocks)
	obstacle := filepath.Join(l.file('a')+newSuffix, "in the way")
	if err := os.MkdirAll(obstacle, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := l.pool.ResetSpace(a.ID); err != nil {
		t.Fatal(err)
	}
	pooltest.Until(t, "failures are counted", func() bool { return l.desk.Report().FileErrors > 0 })
	if err := os.RemoveAll(l.file('a') + newSuffix); err != nil {
		t.Fatal(err)
	}
	l.end()
	if got := l.count(); got['a'] != 0 {
		t.Errorf("blocks in the file: %v, want none of before the reset", got)
	}
}

// TestFolderOfOthers is refused: a link, one that others can read, and what is no folder.
func TestFolderOfOthers(t *testing.T) {
	for name, prepare := range map[string]func(path string) error{
		"a link": func(path string) error {
			return errors.Join(os.Mkdir(path+".target", 0o700), os.Symlink(path+".target", path))
		},
		"a link to nothing": func(path string) error { return os.Symlink(path+".target", path) },
		"readable": func(path string) error { // whatever the umask is
			return errors.Join(os.Mkdir(path, 0o700), os.Chmod(path, 0o755))
		},
		"a file": func(path string) error { return os.WriteFile(path, []byte("text"), 0o600) },
	} {
		l := newLasting(t)
		if err := prepare(l.path); err != nil {
			t.Fatal(err)
		}
		a := l.open('a')
		l.begin()
		l.follow(1, a)
		l.say(a, 0)
		l.until("all is told", a, chainBlocks)
		pooltest.Until(t, name+": failures are counted", func() bool { return l.desk.Report().FileErrors > 0 })
		l.end()
		if _, err := os.Stat(l.file('a')); err == nil {
			t.Errorf("%s: it was written to", name)
		}
	}
}

// TestLinkInTheFolder is not followed out of it.
func TestLinkInTheFolder(t *testing.T) {
	l := newLasting(t)
	a := l.open('a')
	target := l.path + ".target"
	err := errors.Join(os.WriteFile(target, []byte("text"), 0o644), os.Mkdir(l.path, 0o700),
		os.Symlink(target, l.file('a')))
	if err != nil {
		t.Fatal(err)
	}
	l.begin()
	l.follow(1, a)
	l.say(a, 0)
	pooltest.Until(t, "failures are counted", func() bool { return l.desk.Report().FileErrors > 0 })
	l.end()
	if text, err := os.ReadFile(target); err != nil || string(text) != "text" {
		t.Errorf("%q, %v", text, err)
	}
}

// TestForgottenSpaceLeavesTheFile: a reset also takes what an earlier process kept of a space whose
// events nobody asks for, and begins no file.
func TestForgottenSpaceLeavesTheFile(t *testing.T) {
	l := newLasting(t)
	a, b := l.open('a'), l.open('b')
	l.begin()
	l.desk.Forget(a.Print)
	l.end()
	if _, err := os.Stat(l.path); err == nil {
		t.Error("a reset has made the folder")
	}
	l.begin()
	l.follow(1, a)
	l.follow(1, b)
	l.say(a, 0)
	l.say(b, 2)
	l.begin()
	l.desk.Forget(a.Print)
	l.end()
	if got := l.count(); got['a'] != 0 || got['b'] != chainBlocks {
		t.Errorf("blocks in the file: %v", got)
	}
}

// TestFilesAreLimited: an engine may open any number of spaces, one after the other.
func TestFilesAreLimited(t *testing.T) {
	l := newLasting(t)
	err := os.Mkdir(l.path, 0o700)
	for i := range maxFiles + 10 {
		err = errors.Join(err, os.WriteFile(filepath.Join(l.path, fmt.Sprint(i)), nil, 0o600))
	}
	if err != nil {
		t.Fatal(err)
	}
	a := l.open('a')
	l.begin()
	l.follow(1, a)
	l.say(a, 0)
	l.end()
	if list, err := os.ReadDir(l.path); err != nil || len(list) != maxFiles+1 || l.count()['a'] != chainBlocks {
		t.Errorf("%d files, %v: want %d of others, and that of the space", len(list), err, maxFiles)
	}
}

// resetting is a pool of which a space is reset when its epoch is asked for the at-th time.
type resetting struct {
	*dram.Pool
	at, asked int
}

func (r *resetting) Epoch(s pool.SpaceID) uint32 {
	if r.asked++; r.asked == r.at {
		_, _ = r.ResetSpace(s)
	}
	return r.Pool.Epoch(s)
}

// TestResetWhileTheFileIsRead: nothing of before it is kept, what is read after it either.
func TestResetWhileTheFileIsRead(t *testing.T) {
	l := newLasting(t)
	a := l.open('a')
	l.begin()
	l.follow(1, a)
	l.say(a, 0)
	l.end()
	before, err := os.Stat(l.file('a'))
	if err != nil || l.count()['a'] != chainBlocks {
		t.Fatal(l.count(), err)
	}
	l.desk = New(&resetting{Pool: l.pool, at: chainBlocks / 2}, nil, l.path, zap.NewNop())
	t.Cleanup(l.end)
	l.follow(1, a)
	pooltest.Until(t, "the file is made anew", func() bool {
		now, err := os.Stat(l.file('a'))
		return err == nil && !os.SameFile(before, now)
	})
	l.end()
	if got := l.count()['a']; got != 0 {
		t.Errorf("%d blocks of before the reset are in the file", got)
	}
}

// TestClosedSpaceKeepsItsTokens: its blocks may be on a disk. It is closed while its file is made
// anew, and while something is to be written.
func TestClosedSpaceKeepsItsTokens(t *testing.T) {
	l := newLasting(t)
	a := l.open('a')
	l.begin()
	l.follow(1, a)
	l.say(a, 0)
	l.end()
	l.begin()
	l.follow(1, a)
	l.until("all is told", a, chainBlocks)
	d := l.desk
	d.Close() // the rest is what its goroutines do
	l.desk = nil
	d.keeper.folder, d.keeper.files = nil, map[*space]*tokenFile{}
	l.desk = d
	l.say(a, 2)
	l.desk = nil
	sp := d.spaces[a.ID]
	if err := errors.Join(d.keeper.openFolder(true), d.keeper.load(sp)); err != nil {
		t.Fatal(err)
	}
	if err := l.pool.CloseSpace(a.ID); err != nil {
		t.Fatal(err)
	}
	d.mu.Lock()
	sp.comparePart(sp.ledgers[0], 1) // before the desk has noticed
	sp.renew()
	d.mu.Unlock()
	if err := d.keeper.keep(sp, d.keeper.files[sp]); err != nil {
		t.Fatal(err)
	}
	if got := l.count(); got['a'] != 2*chainBlocks {
		t.Errorf("blocks in the file, of a space that was closed while it was made anew: %v", got)
	}
	again := l.open('a')
	d.open(again) // which notices that the closed one is
	if err := d.keeper.turn(); err != nil {
		t.Fatal(err)
	}
	if d.spaces[a.ID] != nil || len(d.keeper.files) != 1 {
		t.Errorf("%d files are open, want that of the space that is", len(d.keeper.files))
	}
	if blocks := len(d.spaces[again.ID].ledgers[0].index); blocks < chainBlocks {
		t.Errorf("%d blocks of the space that was opened again are known", blocks)
	}
}

// TestSpaceIsOpenedAgainBeforeItsFileIsMadeAnew, which waits after a failure: both have one file.
func TestSpaceIsOpenedAgainBeforeItsFileIsMadeAnew(t *testing.T) {
	l := newLasting(t)
	a := l.open('a')
	l.begin()
	l.follow(1, a)
	l.say(a, 0)
	d := l.desk
	d.Close() // the rest is what its goroutines do
	d.keeper.folder, d.keeper.files = nil, map[*space]*tokenFile{}
	l.desk = nil
	turn := func() {
		if err := d.keeper.turn(); err != nil {
			t.Fatal(err)
		}
	}
	turn()
	d.spaces[a.ID].renew()
	if err := l.pool.CloseSpace(a.ID); err != nil {
		t.Fatal(err)
	}
	l.desk = d
	again := l.open('a')
	l.follow(1, again)
	turn()
	l.say(again, 2)
	l.desk = nil
	turn()
	if got := l.count()['a']; got != 2*chainBlocks {
		t.Errorf("%d blocks in the file, want %d", got, 2*chainBlocks)
	}
}

func FuzzReadRecords(f *testing.F) {
	one := newLedger(0, blockTokens, defaultLimits())
	prompt := chain(0)
	var parent, file []byte
	for i := range 3 {
		h := prompt.At(i)
		one.add(h, parent, tokensOf(h), extraOf(h))
		parent = h
	}
	list, _ := one.said(1)
	for _, m := range list {
		var err error
		if file, err = appendRecord(file, m); err != nil {
			f.Fatal(err)
		}
	}
	f.Add(file)
	f.Add(file[:len(file)-1])
	f.Fuzz(func(t *testing.T, file []byte) {
		var again []byte
		end, err := readRecords(bytes.NewReader(file), func(m *ipc.BlockTokens) {
			var err error
			if again, err = appendRecord(again, m); err != nil {
				t.Fatal(err)
			}
		})
		if err != nil || len(again) == int(end) && !bytes.Equal(again, file[:end]) {
			t.Errorf("%x is read, and written as %x: %v", file[:end], again, err)
		}
	})
}
