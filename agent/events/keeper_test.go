package events

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
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
	l.desk = New(l.pool, l.path, zap.NewNop())
	l.t.Cleanup(l.end)
}

func (l *lasting) end() {
	l.desk.Close()
	l.desk = nil
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
	v := &view{t: l.t, name: fmt.Sprint("session ", session), stored: map[string]ipc.EventRun{}, in: map[string]held{}}
	v.most = ipc.MaxEventBlocks
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
	f, err := os.Open(l.path)
	if err != nil {
		l.t.Fatal(err)
	}
	defer f.Close()
	if _, err := readRecords(f, func(fp pool.Fingerprint, _, frame []byte) error {
		m, err := ipc.Decode(recordVersion, bytes.Clone(frame))
		if err == nil {
			all[fp[0]] += len(m.(*ipc.BlockTokens).Hashes) / 8
		}
		return err
	}); err != nil {
		l.t.Fatal(err)
	}
	return all
}

// TestTokensOutliveTheDesk: what one desk was told, the next one tells, of spaces that are opened
// again, also if the file was cut off or damaged at its end; and it goes on with the file.
func TestTokensOutliveTheDesk(t *testing.T) {
	l := newLasting(t)
	a, b := l.open('a'), l.open('b')
	l.begin()
	if _, err := os.Stat(l.path); err == nil {
		t.Error("there is a file while nobody asks for events")
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

	whole, err := os.ReadFile(l.path)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(l.path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v: want a file of the owner's alone", info.Mode(), err)
	}
	for name, damaged := range map[string][]byte{
		"cut off": whole[:len(whole)-3],
		"damaged": flipped(whole, len(whole)-9),
	} {
		if err := os.WriteFile(l.path, damaged, 0o600); err != nil {
			t.Fatal(err)
		}
		l.begin()
		l.until(name+": all but the last block", a, 3*chainBlocks-1)
		l.say(a, 6)
		l.until(name+": the last block is said again", a, 3*chainBlocks)
		l.begin()
		l.until(name+": and kept", a, 3*chainBlocks)
		l.end()
	}
	if err := os.WriteFile(l.path, []byte("something else"), 0o600); err != nil {
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

// TestFileIsMadeAnew when something was not written to it, or a space was reset: with what is held
// alone, and with what is of spaces that are not open.
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
	l.until("a is told", a, chainBlocks)
	l.desk.keeper.behind.Store(true) // as if a record had found no room
	l.say(a, 4)
	pooltest.Until(t, "the file is made anew", func() bool { return !l.desk.keeper.behind.Load() })
	l.until("a is told", a, 2*chainBlocks)
	l.end()
	if got := l.count(); got['b'] != chainBlocks || got['a'] < 2*chainBlocks {
		t.Errorf("blocks in the file: %v", got)
	}
	l.begin()
	l.follow(1, a)
	l.until("a is told again", a, 2*chainBlocks)
	if _, err := l.pool.ResetSpace(a.ID); err != nil {
		t.Fatal(err)
	}
	pooltest.Until(t, "nothing of what was reset is in the file", func() bool {
		got := l.count()
		return got['a'] == 0 && got['b'] == chainBlocks
	})
	l.begin() // whose file does not rest after it was made anew
	l.follow(1, a)
	l.say(a, 4)
	l.tokens(a, 8) // before it is stored
	anew, err := os.Stat(l.path)
	if err != nil {
		t.Fatal(err)
	}
	l.desk.keeper.renew()
	pooltest.Until(t, "the file is made anew", func() bool {
		now, err := os.Stat(l.path)
		return err == nil && !os.SameFile(anew, now)
	})
	if anew, err = os.Stat(l.path); err != nil {
		t.Fatal(err)
	}
	l.store(a, 8)
	l.until("a is told", a, 2*chainBlocks)
	pooltest.Until(t, "all of it is in the file", func() bool { return l.count()['a'] >= 2*chainBlocks })
	if now, err := os.Stat(l.path); err != nil || !os.SameFile(anew, now) {
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
	l.say(a, 2)
	pooltest.Until(t, "the file is open", func() bool { return l.desk.Report().FileBytes > 0 })
	obstacle := filepath.Join(l.path+newSuffix, "in the way")
	if err := os.MkdirAll(obstacle, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := l.pool.ResetSpace(a.ID); err != nil {
		t.Fatal(err)
	}
	pooltest.Until(t, "failures are counted", func() bool { return l.desk.Report().FileErrors > 0 })
	if err := os.RemoveAll(l.path + newSuffix); err != nil {
		t.Fatal(err)
	}
	l.end()
	if got := l.count(); got['a'] != 0 {
		t.Errorf("blocks in the file: %v, want none of before the reset", got)
	}
}

// TestFileOfOthers is refused: a link, one that others can read, what is no file, and one that
// another process has.
func TestFileOfOthers(t *testing.T) {
	for name, prepare := range map[string]func(path string) error{
		"a link": func(path string) error {
			return errors.Join(os.WriteFile(path+".target", []byte("text"), 0o600), os.Symlink(path+".target", path))
		},
		"a link to nothing": func(path string) error { return os.Symlink(path+".target", path) },
		"readable": func(path string) error { // whatever the umask is
			return errors.Join(os.WriteFile(path, []byte("text"), 0o600), os.Chmod(path, 0o644))
		},
		"a directory": func(path string) error { return os.Mkdir(path, 0o700) },
		"a pipe":      func(path string) error { return syscall.Mkfifo(path, 0o600) },
		"in use": func(path string) error {
			f, err := openOwn(path, os.O_CREATE)
			if err == nil {
				t.Cleanup(func() { _ = f.Close() })
				_, err = f.WriteString("text")
			}
			return err
		},
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
		info, err := os.Stat(l.path)
		if name == "a link to nothing" && err == nil {
			t.Errorf("%s: it was followed", name)
		}
		if err != nil || !info.Mode().IsRegular() {
			continue
		}
		if text, err := os.ReadFile(l.path); err != nil || string(text) != "text" {
			t.Errorf("%s: %q, %v: it was written to", name, text, err)
		}
	}
}

// TestFileBegunAnewIsOfTheOwnerAlone: whatever is in the way of the new file, or was left by a
// process that was killed, is replaced and not followed.
func TestFileBegunAnewIsOfTheOwnerAlone(t *testing.T) {
	l := newLasting(t)
	a := l.open('a')
	target := l.path + ".target"
	err := errors.Join(os.WriteFile(target, []byte("text"), 0o644), os.Symlink(target, l.path+newSuffix))
	if err != nil {
		t.Fatal(err)
	}
	l.begin()
	l.follow(1, a)
	l.say(a, 0)
	l.desk.keeper.renew()
	l.end()
	text, err := os.ReadFile(target)
	info, err2 := os.Lstat(l.path)
	if err != nil || err2 != nil || string(text) != "text" || info.Mode() != 0o600 {
		t.Errorf("%q, %v, %v: %v", text, info.Mode(), err, err2)
	}
	if _, err := os.Lstat(l.path + newSuffix); err == nil {
		t.Error("the new file was left")
	}
	l.begin()
	l.until("all is told", a, chainBlocks)
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
		t.Error("a reset has begun a file")
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
	(*Desk)(nil).Forget(a.Print)
}

// TestClosedSpaceKeepsItsTokens: the file is made anew while the desk finds out that a space was
// closed, of which nothing seems to be held any more. Its blocks may be on a disk.
func TestClosedSpaceKeepsItsTokens(t *testing.T) {
	l := newLasting(t)
	a, b := l.open('a'), l.open('b')
	l.begin()
	l.follow(1, a)
	l.follow(1, b)
	l.say(a, 0)
	l.say(b, 2)
	d := l.desk
	d.Close() // the rest is what its goroutines do
	l.desk = nil
	d.keeper.file = nil
	if err := l.pool.CloseSpace(a.ID); err != nil {
		t.Fatal(err)
	}
	if open, _ := d.get(a.ID).compare(); open {
		t.Fatal("the space is open")
	}
	d.get(b.ID).compare()
	d.keeper.makeAnew()
	if got := l.count(); got['a'] != chainBlocks || got['b'] != chainBlocks || d.Report().FileErrors > 0 {
		t.Errorf("blocks in the file: %v, %d errors", got, d.Report().FileErrors)
	}
	again := l.open('a')
	d.open(again) // before the desk has dropped the closed one
	if err := d.keeper.loadNew(); err != nil {
		t.Fatal(err)
	}
	if blocks := len(d.get(again.ID).ledgers[0].index); blocks != chainBlocks {
		t.Errorf("%d blocks of the space that was opened again are known", blocks)
	}
	for range 20 { // in either order
		d.keeper.loaded = map[*space]bool{} // as by a desk that is late, which loads both at once
		delete(d.spaces, again.ID)
		sp := d.open(again)
		if err := d.keeper.loadNew(); err != nil {
			t.Fatal(err)
		}
		if blocks := len(sp.ledgers[0].index); blocks != chainBlocks {
			t.Fatalf("%d blocks of the space that was opened again are known", blocks)
		}
	}
	d.compareAll()
	if err := d.keeper.loadNew(); err != nil {
		t.Fatal(err)
	}
	if d.get(a.ID) != nil || len(d.keeper.loaded) != 2 {
		t.Errorf("%d spaces are kept, want the two that are open", len(d.keeper.loaded))
	}
	if err := d.keeper.file.Close(); err != nil {
		t.Fatal(err)
	}
}

func FuzzReadRecords(f *testing.F) {
	one, err := appendRecord([]byte(tokenMagic), pool.Fingerprint{1}, &ipc.BlockTokens{
		HashLen: 8, Hashes: make([]byte, 16), Tokens: make([]byte, 32), Extra: []byte{1},
	})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(one)
	f.Add(one[:len(one)-1])
	f.Add([]byte(tokenMagic))
	f.Fuzz(func(t *testing.T, file []byte) {
		again := []byte(tokenMagic)
		end, err := readRecords(bytes.NewReader(file), func(fp pool.Fingerprint, whole, frame []byte) error {
			m, err := ipc.Decode(recordVersion, bytes.Clone(frame))
			said, ok := m.(*ipc.BlockTokens)
			if err != nil || !ok {
				return io.ErrUnexpectedEOF // loadNew skips it
			}
			again, err = appendRecord(again, fp, said)
			return err
		})
		if err == nil && !bytes.Equal(again, file[:end]) {
			t.Errorf("%x is read, and written as %x", file[:end], again)
		}
	})
}

// BenchmarkKeep reports what it costs to keep what a save of 64 blocks says.
func BenchmarkKeep(b *testing.B) {
	const n = 64
	said := &ipc.BlockTokens{HashLen: 32, Hashes: make([]byte, n*32), Tokens: make([]byte, n*64)}
	b.ReportAllocs()
	var one []byte
	for b.Loop() {
		var err error
		if one, err = appendRecord(nil, pool.Fingerprint{1}, said); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(len(one))/n, "bytes/block")
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/block")
}

// BenchmarkLoad reports what it costs to read the tokens of a large space again.
func BenchmarkLoad(b *testing.B) {
	const runs, n = 1 << 12, 64
	file := []byte(tokenMagic)
	for i := range runs {
		said := &ipc.BlockTokens{HashLen: 32, Hashes: make([]byte, n*32), Tokens: make([]byte, n*64)}
		for k := range n {
			said.Hashes[k*32], said.Hashes[k*32+1], said.Hashes[k*32+2] = byte(k), byte(i), byte(i>>8)
		}
		var err error
		if file, err = appendRecord(file, pool.Fingerprint{1}, said); err != nil {
			b.Fatal(err)
		}
	}
	p, err := dram.Open(dram.Options{Bytes: 1 << 20, SlabBytes: 4 << 10, Virtual: true})
	if err != nil {
		b.Fatal(err)
	}
	defer p.Close()
	id, err := p.OpenSpace(pool.Spec{Shards: 1, Groups: []pool.Group{{BlockTokens: 16, ShardBytes: []uint32{1024}}}})
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		sp := newSpace(&lookup.Space{ID: id, Groups: []lookup.Group{{BlockTokens: 16}}}, p, defaultLimits())
		_, err := readRecords(bytes.NewReader(file), func(_ pool.Fingerprint, _, frame []byte) error {
			m, err := ipc.Decode(recordVersion, frame)
			if err == nil {
				sp.learn(m.(*ipc.BlockTokens))
			}
			return err
		})
		if err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/(runs*n), "ns/block")
}
