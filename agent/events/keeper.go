package events

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"maps"
	"os"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

// Limits of the files of tokens.
const (
	minRewrite = 16 << 20    // bytes: a smaller file is not made anew to save room
	maxUnused  = 512 << 20   // bytes of files of spaces that are not open; the oldest are removed
	maxFiles   = 1 << 10     // of such files
	failedRest = time.Minute // after a failure
)

// keeper keeps the tokens of blocks in a file for each space, for the next process: its blocks may
// outlive this one. A nil keeper keeps nothing.
type keeper struct {
	desk      *Desk
	path      string // of the folder
	log       *zap.Logger
	wake      chan struct{} // cap 1
	errors    atomic.Uint64
	forgotten map[string]bool // files of spaces that were reset; the desk's lock guards it

	// The following is the goroutine's.
	folder *os.Root // nil: not opened
	files  map[*space]*tokenFile
}

// tokenFile is a log of BLOCK_TOKENS as on the wire, each after its length and CRC-32C as u32 LE. A
// reader stops at the first one that is not whole: the process was killed while it wrote it.
// Nothing depends on their order, and a block may be in several.
type tokenFile struct {
	file        *os.File
	size, limit int64 // a larger file is made anew
}

const (
	recordHead = 8
	newSuffix  = ".new" // of a file's name while it is made anew
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// nameOf returns the name of a space's file.
func nameOf(fp pool.Fingerprint) string { return hex.EncodeToString(fp[:]) }

// signal tells the keeper that there may be something to load, to keep or to let go of.
func (k *keeper) signal() {
	if k != nil {
		select {
		case k.wake <- struct{}{}:
		default:
		}
	}
}

// work serves the files until the desk ends. After a failure it rests, and makes all files anew:
// what they lack is not remembered.
func (k *keeper) work() {
	for ends := false; !ends; {
		select {
		case <-k.desk.stop:
			ends = true
		case <-k.wake:
		}
		err := k.turn()
		if err == nil {
			continue
		}
		k.errors.Add(1)
		k.log.Warn("the files of KV events' tokens", zap.String("folder", k.path), zap.Error(err))
		k.desk.mu.Lock()
		for _, sp := range k.desk.spaces {
			sp.renew()
		}
		k.desk.mu.Unlock()
		select {
		case <-k.desk.stop:
		case <-time.After(failedRest):
			k.signal()
		}
	}
	for _, f := range k.files {
		_ = f.file.Close() // what was written is checked
	}
	if k.folder != nil {
		_ = k.folder.Close()
	}
}

// turn brings the files up to date.
func (k *keeper) turn() (err error) {
	k.desk.mu.Lock()
	spaces, remove := maps.Clone(k.desk.spaces), len(k.forgotten) > 0
	k.desk.mu.Unlock()
	if err = k.openFolder(len(spaces) > 0); err != nil {
		if len(spaces) == 0 && errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	}
	for sp, f := range k.files {
		if spaces[sp.id] != sp { // it was closed, which its blocks may outlive, and may be open again
			err = errors.Join(err, k.keep(sp, f), f.file.Close())
			delete(k.files, sp)
		}
	}
	for _, sp := range spaces {
		if k.files[sp] == nil {
			remove = true // to make room for its file
			err = errors.Join(err, k.load(sp))
		}
		if f := k.files[sp]; f != nil {
			err = errors.Join(err, k.keep(sp, f))
		}
	}
	if remove {
		err = errors.Join(err, k.removeUnused())
	}
	return err
}

// load says to a space what its file has.
func (k *keeper) load(sp *space) error {
	file, err := k.folder.OpenFile(nameOf(sp.print), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	epoch := uint32(0)
	size, err := readRecords(file, func(m *ipc.BlockTokens) {
		k.desk.mu.Lock()
		defer k.desk.mu.Unlock()
		if epoch == 0 {
			epoch = sp.epoch
		}
		if sp.follow(); sp.epoch == epoch { // what is of before a reset is forgotten
			sp.learn(m, true)
		}
	})
	if err != nil {
		return errors.Join(err, file.Close())
	}
	k.files[sp] = &tokenFile{file: file, size: size, limit: max(minRewrite, 2*size)}
	return nil
}

// keep writes what is to be kept of a space, all that is known when the file is made anew.
func (k *keeper) keep(sp *space, f *tokenFile) error {
	k.desk.mu.Lock()
	anew, list := sp.anew || f.size > f.limit, sp.unkept
	sp.anew, sp.unkept, sp.unkeptBytes = false, nil, 0
	k.desk.mu.Unlock()
	if !anew {
		return f.write(list)
	}
	name := nameOf(sp.print)
	file, err := k.folder.OpenFile(name+newSuffix, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	next := &tokenFile{file: file}
	for i := range sp.ledgers {
		for from, more := uint32(1), true; more && err == nil; from += holdsStride {
			k.desk.mu.Lock()
			list, more = sp.ledgers[i].said(from)
			k.desk.mu.Unlock()
			err = next.write(list)
		}
	}
	if err == nil {
		err = file.Sync()
	}
	if err == nil {
		err = k.folder.Rename(name+newSuffix, name)
	}
	if err != nil {
		return errors.Join(err, file.Close())
	}
	next.limit = max(minRewrite, 2*next.size)
	err = f.file.Close()
	*f = *next
	return err
}

// said returns the tokens of some blocks from a number on, and whether there are more.
func (l *ledger) said(from uint32) (list []*ipc.BlockTokens, more bool) {
	var known []event
	for n := from; n < min(l.high, from+holdsStride); n++ {
		if l.at(n).known {
			known = append(known, event{l, n, 0, true})
		}
	}
	for _, r := range runs(known) {
		m := r.message()
		list = append(list, &ipc.BlockTokens{
			Group: m.Group, Parent: m.Parent, HashLen: m.HashLen, Hashes: m.Hashes, Tokens: m.Tokens, Extra: m.Extra,
		})
	}
	return list, from+holdsStride < l.high
}

// write adds records at the end of the file.
func (f *tokenFile) write(list []*ipc.BlockTokens) (err error) {
	var out []byte
	for _, m := range list {
		if out, err = appendRecord(out, m); err != nil {
			return err
		}
	}
	_, err = f.file.WriteAt(out, f.size)
	f.size += int64(len(out))
	return err
}

// appendRecord appends a record to dst.
func appendRecord(dst []byte, m *ipc.BlockTokens) ([]byte, error) {
	at := len(dst)
	out, err := ipc.Encode(append(dst, make([]byte, recordHead)...), m)
	if err != nil {
		return nil, err
	}
	body := out[at+recordHead:]
	binary.LittleEndian.PutUint32(out[at:], uint32(len(body)))
	binary.LittleEndian.PutUint32(out[at+4:], crc32.Checksum(body, castagnoli))
	return out, nil
}

// readRecords calls found with each record, and returns where the last whole one ends.
func readRecords(from io.Reader, found func(*ipc.BlockTokens)) (end int64, err error) {
	in := bufio.NewReaderSize(from, 1<<20)
	var head [recordHead]byte
	for {
		if _, err = io.ReadFull(in, head[:]); err != nil {
			break
		}
		body := make([]byte, min(binary.LittleEndian.Uint32(head[:]), ipc.MaxFrame+1))
		if _, err = io.ReadFull(in, body); err != nil {
			break
		}
		m, bad := ipc.Decode(body)
		said, is := m.(*ipc.BlockTokens)
		if bad != nil || !is || crc32.Checksum(body, castagnoli) != binary.LittleEndian.Uint32(head[4:]) {
			break
		}
		found(said)
		end += int64(len(head) + len(body))
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		err = nil
	}
	return end, err
}

// removeUnused removes, of the files of spaces that are not open, those that are forgotten, and the
// oldest while there are too many or they have too many bytes.
func (k *keeper) removeUnused() error {
	used := map[string]bool{}
	k.desk.mu.Lock()
	for _, sp := range k.desk.spaces {
		used[nameOf(sp.print)] = true
	}
	forgotten := k.forgotten
	k.forgotten = map[string]bool{}
	k.desk.mu.Unlock()
	list, err := fs.ReadDir(k.folder.FS(), ".")
	if err != nil {
		return err
	}
	var files []fs.FileInfo
	for _, one := range list {
		if info, err := one.Info(); err == nil && !used[one.Name()] {
			files = append(files, info)
		}
	}
	slices.SortFunc(files, func(a, b fs.FileInfo) int { return b.ModTime().Compare(a.ModTime()) })
	bytes := int64(0)
	for i, one := range files {
		if bytes += one.Size(); i >= maxFiles || bytes > maxUnused || forgotten[one.Name()] {
			err = errors.Join(err, k.folder.Remove(one.Name()))
		}
	}
	return err
}

// openFolder opens the folder. Only the agent's user may reach it: it has prompts. The pool beside
// it is locked, so no other process has it.
func (k *keeper) openFolder(create bool) error {
	if k.folder != nil {
		return nil
	}
	if create {
		if err := os.Mkdir(k.path, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	info, err := os.Lstat(k.path)
	if err != nil {
		return err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok || !info.IsDir() || int(st.Uid) != os.Geteuid() || info.Mode().Perm()&0o077 != 0 {
		return fmt.Errorf("%s: %v, allowed: a folder of uid %d, mode 0700", k.path, info.Mode(), os.Geteuid())
	}
	root, err := os.OpenRoot(k.path)
	if err != nil {
		return err
	}
	if now, err := root.Stat("."); err != nil || !os.SameFile(info, now) {
		return errors.Join(fmt.Errorf("%s: it was replaced", k.path), root.Close())
	}
	k.folder = root
	return nil
}
