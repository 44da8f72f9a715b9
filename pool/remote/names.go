package remote

import "github.com/kvagent/kvagent/pool"

// Valid reports whether a key can be stored.
func Valid(k *pool.Key) bool { return k.Hash.Len >= 1 && k.Hash.Len <= pool.MaxHashLen }

// Name returns the name of a key's value: a prefix and the key's text.
func Name(prefix string, k *pool.Key) string {
	b := make([]byte, 0, len(prefix)+pool.MaxKeyText)
	return string(k.AppendText(append(b, prefix...)))
}
