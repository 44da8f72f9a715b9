//go:build !amd64

package host

type moveForm struct {
	name string
	use  func() func()
}

func moveForms() []moveForm {
	return []moveForm{{"portable", func() func() { return func() {} }}}
}
