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

// FirstBlock returns the bytes of the first layer, on the first rank, of the first block that a
// prompt of these hash ids has in group 0. A stored block begins with them, so that a test finds it
// in a pool's memory. cfg is validated.
func FirstBlock(cfg *Config, prompt []uint64) ([]byte, error) {
	size := cfg.blockTokens(0)
	if have := len(prompt) * TraceBlock; have < size {
		return nil, fmt.Errorf("a prompt of %d tokens has no block of %d", have, size)
	}
	s, err := newShape(size, cfg.BlockBytes/layers)
	if err != nil {
		return nil, err
	}
	tokens := make([]uint32, len(prompt)*TraceBlock)
	for i, id := range prompt {
		promptTokens(tokens[i*TraceBlock:][:TraceBlock], id)
	}
	bases, _ := s.appendBase(nil, startChain(&noHash), 0, tokens[:size])
	mem := make([]byte, len(bases)*wordBytes)
	fill(mem, bases, salt(0, 0, 0))
	return mem, nil
}
