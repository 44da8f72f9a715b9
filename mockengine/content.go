package mockengine

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
)

// Hash is a block hash: SHA-256 over the parent's hash and the block's tokens, so it certifies the
// whole prefix.
type Hash [sha256.Size]byte

// promptTokens writes the n tokens of a trace's hash id.
func promptTokens(dst []uint32, id uint64) {
	x := mix(id + 1)
	for i := range dst {
		dst[i] = uint32(mix(x+uint64(i)) >> 33)
	}
}

// outputTokens writes an answer's tokens; they depend on the request alone, so a request that runs
// again gives the same answer.
func outputTokens(dst []uint32, request uint64) {
	x := mix(^request)
	for i := range dst {
		dst[i] = uint32(mix(x+uint64(i)) >> 33)
	}
}

// hasher chains block hashes; it holds the buffer of one goroutine.
type hasher struct{ buf []byte }

func (h *hasher) next(parent *Hash, tokens []uint32) Hash {
	h.buf = append(h.buf[:0], parent[:]...)
	for _, t := range tokens {
		h.buf = binary.LittleEndian.AppendUint32(h.buf, t)
	}
	return sha256.Sum256(h.buf)
}

// mix is the finaliser of SplitMix64 (Steele, Lea, Flood 2014).
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// wordBytes is the unit of content: each block is words that derive from a token and all before it.
const wordBytes = 8

// shape maps the tokens of one block to the words of one of its segments: word w holds tokens up to
// and including the one that completes it, or is one of several words of a token.
type shape struct {
	tokens  int // of a block
	words   int // of a segment of a block
	perWord int // tokens that complete a word, at least 1
	perTok  int // words of a token, at least 1
}

func newShape(tokens, segmentBytes int) (shape, error) {
	s := shape{tokens: tokens, words: segmentBytes / wordBytes, perWord: 1, perTok: 1}
	switch {
	case tokens < 1:
		return s, fmt.Errorf("block tokens are %d, allowed are 1 and more", tokens)
	case s.words < 1 || segmentBytes%wordBytes != 0:
		return s, fmt.Errorf("a segment of %d bytes: allowed are multiples of %d", segmentBytes, wordBytes)
	case s.words%tokens == 0:
		s.perTok = s.words / tokens
	case tokens%s.words == 0:
		s.perWord = tokens / s.words
	default:
		return s, fmt.Errorf("a segment of %d words and a block of %d tokens: one must divide the other", s.words,
			tokens)
	}
	return s, nil
}

// complete returns the number of words that the first n tokens of a block determine.
func (s *shape) complete(n int) int { return n / s.perWord * s.perTok }

// chain is the running state over the tokens of a block; it depends on everything before it.
type chain uint64

// startChain begins the block after the block with that hash.
func startChain(parent *Hash) chain {
	return chain(binary.LittleEndian.Uint64(parent[0:]) ^ binary.LittleEndian.Uint64(parent[8:])*0x9e3779b97f4a7c15)
}

func (c chain) next(token uint32) chain {
	x := (uint64(c) ^ uint64(token)) * 0xd6e8feb86659fd93
	return chain(x ^ x>>32)
}

// appendBase appends the bases of the words that tokens from to from+len(tokens)-1 of a block
// complete. c is the state before them; it returns the state after them. All layers and ranks
// derive their word from its base.
func (s *shape) appendBase(base []uint64, c chain, from int, tokens []uint32) ([]uint64, chain) {
	for i, t := range tokens {
		c = c.next(t)
		if (from+i+1)%s.perWord != 0 {
			continue
		}
		for k := range s.perTok {
			base = append(base, uint64(c)+uint64(k)*0x9e3779b97f4a7c15)
		}
	}
	return base, c
}

// salt distinguishes group, segment (layer) and rank.
func salt(group, segment, rank int) uint64 {
	return mix(uint64(group)<<40 | uint64(segment)<<20 | uint64(rank))
}

func word(base, salt uint64) uint64 {
	x := (base ^ salt) * 0xff51afd7ed558ccd
	return x ^ x>>32
}

// fill writes the words of bases to mem, which has room for them.
func fill(mem []byte, bases []uint64, salt uint64) {
	mem = mem[:len(bases)*wordBytes]
	for i, b := range bases {
		binary.LittleEndian.PutUint64(mem[i*wordBytes:], word(b, salt))
	}
}

// wrong counts the bytes of mem that are not what fill would have written.
func wrong(mem []byte, bases []uint64, salt uint64) (n int) {
	mem = mem[:len(bases)*wordBytes]
	for i, b := range bases {
		if d := binary.LittleEndian.Uint64(mem[i*wordBytes:]) ^ word(b, salt); d != 0 {
			n += wrongBytes(d)
		}
	}
	return n
}

func wrongBytes(d uint64) (n int) {
	for ; d != 0; d >>= 8 {
		if d&0xff != 0 {
			n++
		}
	}
	return n
}

// BlockID is a block of the engine's KV cache. 0 is the null block: never given, never saved.
type BlockID = uint32

// cacheKey is the key of a block in the prefix cache.
type cacheKey struct {
	group uint8
	hash  Hash
}

// blockPool is the engine's KV cache memory as vLLM manages it: reference counts, a list of free
// blocks in the order of their reuse, and a prefix cache over full blocks. A free block keeps its
// content and can be found until it is reused. Groups share the blocks; a block belongs to one
// group at a time. It is not safe for concurrent use.
type blockPool struct {
	blocks []block
	cached map[cacheKey]BlockID
	free   int // blocks in the free list
}

type block struct {
	refs       int32
	published  bool
	prev, next BlockID // in the free list, which is a ring through block 0
	key        cacheKey
}

// newBlockPool returns n blocks, numbered 1 to n, all free.
func newBlockPool(n int) *blockPool {
	p := &blockPool{blocks: make([]block, n+1), cached: make(map[cacheKey]BlockID)}
	for id := 1; id <= n; id++ {
		p.pushBack(BlockID(id))
	}
	return p
}

// find returns the cached block of a key, without a reference.
func (p *blockPool) find(k cacheKey) (BlockID, bool) {
	id, ok := p.cached[k]
	return id, ok
}

// ref adds a reference, and removes the block from the free list if necessary.
func (p *blockPool) ref(id BlockID) {
	b := &p.blocks[id]
	if b.refs == 0 {
		p.unlink(id)
	}
	b.refs++
}

// unref drops a reference. The last one puts the block at the end of the free list, or, if the
// block has no key, at the front, so that it is reused before cached ones.
func (p *blockPool) unref(id BlockID) {
	b := &p.blocks[id]
	if b.refs <= 0 {
		panic("a block was given back more often than it was taken")
	}
	if b.refs--; b.refs > 0 {
		return
	}
	if b.published {
		p.pushBack(id)
	} else {
		p.pushFront(id)
	}
}

// take returns the block that was free longest, with one reference and without its key.
func (p *blockPool) take() (BlockID, bool) {
	id := p.blocks[0].next
	if id == 0 {
		return 0, false
	}
	p.forget(id)
	p.ref(id)
	return id, true
}

// publish makes a block findable. The first block of a key stays; a second one remains private.
func (p *blockPool) publish(id BlockID, k cacheKey) {
	b := &p.blocks[id]
	if b.published {
		return
	}
	if _, ok := p.cached[k]; ok {
		return
	}
	b.published, b.key = true, k
	p.cached[k] = id
}

func (p *blockPool) forget(id BlockID) {
	if b := &p.blocks[id]; b.published {
		delete(p.cached, b.key)
		b.published = false
	}
}

func (p *blockPool) pushBack(id BlockID)  { p.link(id, p.blocks[0].prev, 0) }
func (p *blockPool) pushFront(id BlockID) { p.link(id, 0, p.blocks[0].next) }

func (p *blockPool) link(id, prev, next BlockID) {
	p.blocks[id].prev, p.blocks[id].next = prev, next
	p.blocks[prev].next, p.blocks[next].prev = id, id
	p.free++
}

func (p *blockPool) unlink(id BlockID) {
	b := &p.blocks[id]
	p.blocks[b.prev].next, p.blocks[b.next].prev = b.next, b.prev
	p.free--
}
