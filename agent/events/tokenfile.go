package events

import (
	"bufio"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

// The file of tokens is a log: tokenMagic, then records of what engines said, each
//
//	u32 LE  bytes of the body
//	u32 LE  CRC-32C of the body
//	body    fingerprint of the space, 16 bytes; a BLOCK_TOKENS as on the wire, in version 3
//
// A reader stops at the first record that is not whole: the process was killed while it wrote it.
// Nothing depends on the order of records, and a block may be in several.
const (
	tokenMagic    = "kvtokens1\n"
	recordHead    = 8
	recordVersion = 3
	maxRecord     = len(pool.Fingerprint{}) + ipc.MaxFrame
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

var errNoTokens = errors.New("not a file of tokens")

// appendRecord appends a record to dst.
func appendRecord(dst []byte, fp pool.Fingerprint, m *ipc.BlockTokens) ([]byte, error) {
	at := len(dst)
	out := append(dst, make([]byte, recordHead)...)
	out = append(out, fp[:]...)
	out, err := ipc.Encode(out, recordVersion, m)
	if err != nil {
		return dst, err
	}
	body := out[at+recordHead:]
	binary.LittleEndian.PutUint32(out[at:], uint32(len(body)))
	binary.LittleEndian.PutUint32(out[at+4:], crc32.Checksum(body, castagnoli))
	return out, nil
}

// readRecords calls found with each whole record, of which the slices are valid during the call. It
// returns where the last one ends. The end of the file, or of what is whole, is no error.
func readRecords(from io.Reader, found func(fp pool.Fingerprint, whole, frame []byte) error) (end int64, err error) {
	in := bufio.NewReaderSize(from, 1<<20)
	magic := make([]byte, len(tokenMagic))
	if _, err := io.ReadFull(in, magic); onlyEnd(err) != nil {
		return 0, err
	}
	if string(magic) != tokenMagic {
		return 0, errNoTokens
	}
	end = int64(len(magic))
	whole := make([]byte, recordHead, 1<<16)
	for {
		if _, err := io.ReadFull(in, whole[:recordHead]); err != nil {
			return end, onlyEnd(err)
		}
		n := binary.LittleEndian.Uint32(whole)
		if int64(n) > int64(maxRecord) || int(n) < len(pool.Fingerprint{}) {
			return end, nil
		}
		whole = append(whole[:recordHead], make([]byte, n)...)
		body := whole[recordHead:]
		if _, err := io.ReadFull(in, body); err != nil {
			return end, onlyEnd(err)
		}
		if crc32.Checksum(body, castagnoli) != binary.LittleEndian.Uint32(whole[4:]) {
			return end, nil
		}
		fp := pool.Fingerprint(body[:16])
		if err := found(fp, whole, body[len(fp):]); err != nil {
			return end, err
		}
		end += int64(len(whole))
	}
}

// onlyEnd returns nil if an error is that the file ends.
func onlyEnd(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return nil
	}
	return err
}

// maxRunBytes bounds the tokens of a record that is written from a ledger.
const maxRunBytes = 64 << 10

// said returns the tokens of a part of the blocks, as engines say them, and the block to continue
// at, 0 at the end. Blocks that no medium holds are left out, and are not kept from now on.
func (l *ledger) said(from uint32) (list []*ipc.BlockTokens, next uint32) {
	to := min(l.high, from+compareStride)
	last := uint32(0)
	for n := from; n < to; n++ {
		b := l.at(n)
		if b.flags &^= flagKept; b.is(flagKnown) && b.held() != 0 {
			list, last = l.say(list, last, n), n
		}
	}
	if to < l.high {
		return list, to
	}
	return list, 0
}

// saidUnkept returns the tokens of blocks that came to be held since the last call, and are not in
// the file: they were not held when it was made. more: there were too many to note.
func (l *ledger) saidUnkept(list []*ipc.BlockTokens) (all []*ipc.BlockTokens, more bool) {
	last := uint32(0)
	for _, n := range l.unkept {
		if b := l.at(n); b.is(flagKnown) && b.held() != 0 && !b.is(flagKept) {
			list, last = l.say(list, last, n), n
		}
	}
	more = len(l.unkept) == maxUnkept
	l.unkept = l.unkept[:0]
	return list, more
}

// say adds the tokens of a block to a list, to its last run if that ends with the block before it.
// last is that block; 0: the block begins a run.
func (l *ledger) say(list []*ipc.BlockTokens, last, n uint32) []*ipc.BlockTokens {
	b := l.at(n)
	b.flags |= flagKept
	extra := l.extras.get(b.extra)
	var run *ipc.BlockTokens
	if last != 0 && !b.is(flagRoot) && b.parent == last {
		run = list[len(list)-1]
	}
	if run == nil || string(extra) != string(run.Extra) || run.HashLen != b.hash.Len ||
		len(run.Tokens)+l.stride > maxRunBytes {
		run = &ipc.BlockTokens{Group: l.group, HashLen: b.hash.Len, Extra: append([]byte(nil), extra...)}
		if !b.is(flagRoot) {
			p := l.at(b.parent)
			run.Parent = append([]byte(nil), p.hash.Bytes[:p.hash.Len]...)
		}
		list = append(list, run)
	}
	run.Hashes = append(run.Hashes, b.hash.Bytes[:b.hash.Len]...)
	run.Tokens = append(run.Tokens, l.tokens(n)...)
	return list
}
