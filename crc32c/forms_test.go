//go:build !amd64

package crc32c

type form struct {
	name string
	use  func() func()
}

func forms() []form {
	return []form{{"portable", func() func() { return func() {} }}}
}
